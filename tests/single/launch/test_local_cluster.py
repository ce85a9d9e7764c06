"""What a machine lacks for a cluster of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LAUNCH = Path(__file__).parents[3] / "launch"
LACKING = """
import os, pwd, shutil, sys
sys.path.insert(0, sys.argv[1])
os.geteuid, shutil.which = lambda: 0, lambda program, **more: program
def gone(name):
    raise KeyError(name)
pwd.getpwnam = gone
import local_cluster
print(local_cluster.missing())
"""


def test_an_sshd_whose_package_is_still_being_installed_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", LACKING, str(LAUNCH)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the user sshd of sshd is missing; run apt-get install --reinstall openssh-server" in done.stdout


COMING_UP = """
import sys
sys.path.insert(0, sys.argv[1])
import cluster_cli, cluster_state
cluster_state.PREFIX = sys.argv[2]
cluster_cli.clusters = lambda: ["c0"]
for words in (["status"], ["status", "--name", "c0"]):
    print(cluster_cli.main(words))
"""


def test_a_cluster_that_is_coming_up_is_told_as_that(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMING_UP, str(LAUNCH), f"{tmp_path}/cluster."]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1"], done
    assert done.stderr.count("cluster c0 is starting or stopping; try again") == 2
