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
    assert "the user sshd is missing, for sshd: apt-get install --reinstall openssh-server" in done.stdout
