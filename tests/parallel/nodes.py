"""Local clusters for tests: launch/cluster and launch/local_slurm, with what Debian packages they need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.mpirun import ROOT, environment

PACKAGES = {
    "cluster": ("openssh-server", "iproute2"),
    "local_slurm": ("openssh-server", "iproute2", "slurm-wlm", "munge"),
}
WAIT_SECONDS = 240.0


@dataclass(frozen=True)
class Nodes:
    """A cluster that is up."""

    name: str
    names: tuple[str, ...]

    @property
    def hosts(self) -> str:
        return ",".join(f"{name}:1" for name in self.names)

    def command(self, *words: str, on: str = "node0") -> list[str]:
        return [str(ROOT / "launch/cluster"), "run", "--name", self.name, "--on", on, "--", *words]

    def run(self, *words: str, on: str = "node0", **variables: str) -> subprocess.CompletedProcess[str]:
        """What the command on a node said; the test fails when it does not end."""
        return launch(self.command(*words, on=on), **variables)

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """The command, running on node0; its output comes with `communicate`."""
        pipe = subprocess.PIPE
        words = tuple(self.command(*words))
        return subprocess.Popen(words, cwd=ROOT, env=_variables(variables), stdout=pipe, stderr=pipe, text=True)

    def left(self, pattern: str) -> list[str]:
        """Nodes on which a process matches the pattern, after the time that a job takes to end."""
        deadline = time.monotonic() + 10
        while True:
            found = [name for name in self.names if self.run("pgrep", "-f", pattern, on=name).returncode == 0]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)


def launch(words: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """What one of the programs in launch/ said."""
    return subprocess.run(
        words, cwd=ROOT, env=_variables(variables), capture_output=True, text=True, timeout=WAIT_SECONDS
    )


def _variables(changes: dict[str, str]) -> dict[str, str]:
    """The variables of a user's shell: none of those that tests set for ranks on one machine."""
    known = environment({}, out=Path("/nonexistent"), timeout=WAIT_SECONDS)
    return {name: value for name, value in known.items() if not name.startswith(("OMPI_", "HVFREEZE_"))} | changes


@contextmanager
def up(program: str, *options: str) -> Iterator[Nodes]:
    """A cluster of `launch/PROGRAM up OPTIONS`; skips the test with the reason where that cannot be."""
    _require(program, *(["--latency"] if "--latency" in options else []))
    name = f"test{os.getpid()}-{time.monotonic_ns()}"
    done = launch([str(ROOT / "launch" / program), "up", "--name", name, "--owner", str(os.getpid()), *options])
    assert done.returncode == 0, done.stderr
    try:
        yield Nodes(name, tuple(node["name"] for node in state(name)["nodes"]))
    finally:
        launch([str(ROOT / "launch/cluster"), "down", "--name", name])
    assert not Path(f"/run/hvfreeze-cluster.{name}").exists()


def state(name: str) -> dict[str, Any]:
    """The cluster as `status --json` tells it."""
    said = launch([str(ROOT / "launch/cluster"), "status", "--name", name, "--json"])
    assert said.returncode == 0, said.stderr
    found: dict[str, Any] = json.loads(said.stdout)[0]
    return found


def _require(program: str, *options: str) -> None:
    """The program's requirements are met; its packages are installed once where that starts no daemon."""
    check = [str(ROOT / "launch" / program), "check", *options]
    if launch(check).returncode == 0:
        return
    if os.geteuid() == 0 and shutil.which("apt-get") and not Path("/run/systemd/system").exists():
        print(f"installing {' '.join(PACKAGES[program])}", file=sys.stderr)
        # Another process may be installing them.
        patience = ("-o", "DPkg::Lock::Timeout=120")
        install = ["apt-get", *patience, "install", "-y", "--no-install-recommends", *PACKAGES[program]]
        variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(install, env=variables, capture_output=True).returncode != 0:
            subprocess.run(["apt-get", "update"], env=variables, capture_output=True)
            subprocess.run(install, env=variables, capture_output=True)
    done = launch(check)
    if done.returncode != 0:
        pytest.skip(done.stderr.strip())


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory that all nodes see, removed at once: pytest would keep the checkpoints in its own."""
    with tempfile.TemporaryDirectory(prefix="hvfreeze-nodes-") as folder:
        yield Path(folder)


def wait_until(condition: Callable[[], object], *, what: str) -> None:
    """The condition holds; the test fails when it never does."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.05)


def training(run_dir: Path, *options: str) -> list[str]:
    """A training command that takes seconds and writes a checkpoint after each of its epochs."""
    words = "--model shufflenet_v2_x0_5 --image-size 32 --batch-size 16 --lr 0.01 --checkpoint-every 1".split()
    return [sys.executable, "-m", "hvfreeze", "train", *words, "--run-dir", str(run_dir), *options]


def digest(run_dir: Path) -> str:
    """The digest of the run's last parameters."""
    found: str = json.loads((run_dir / "summary.json").read_text())["parameter_digest"]
    return found


def attempts(run_dir: Path) -> list[dict[str, Any]]:
    """What launch/restart wrote down."""
    return [json.loads(line) for line in (run_dir / "restarts.jsonl").read_text().splitlines()]
