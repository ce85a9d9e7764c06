"""What is known of the clusters on this machine: a directory under /run for each, locked by its supervisor."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

PREFIX = "/run/hvfreeze-cluster."


class ClusterError(Exception):
    """What the user sees instead of a traceback."""


@dataclass(frozen=True)
class Node:
    """A node as others see it; `pid` is its PID 1 as the host counts, 0 once the node is dead."""

    name: str
    address: str
    pid: int


@dataclass(frozen=True)
class Plan:
    """A cluster to be.

    `bandwidth` limits every node in both directions (tc's notation, "" for no limit), `slots` is how many ranks a node
    takes, `disk` the size of its private $TMPDIR, in memory; `latency` is how many seconds a message takes from node to
    node beside what the bandwidth takes, 0 for what the kernel takes.
    """

    nodes: int = 4
    slots: int = 1
    bandwidth: str = ""
    disk: str = "1g"
    latency: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up; its state file is `directory`/state.json."""

    name: str
    supervisor: int
    slots: int
    bandwidth: str
    nodes: tuple[Node, ...]
    environment: dict[str, str]
    latency: float = 0.0

    @property
    def directory(self) -> Path:
        """Where its state, keys and settings are."""
        return Path(PREFIX + self.name)

    @property
    def hosts(self) -> str:
        """As -H wants them: node0:1,node1:1,..."""
        return ",".join(f"{node.name}:{self.slots}" for node in self.nodes if node.pid)

    def node(self, name: str) -> Node:
        """Return the living node of this name.

        Raises:
            ClusterError: there is none.
        """
        for node in self.nodes:
            if node.name == name:
                if not node.pid:
                    raise ClusterError(f"{name} of cluster {self.name!r} is dead")
                return node
        raise ClusterError(f"cluster {self.name!r} has no node {name!r}: {', '.join(n.name for n in self.nodes)}")

    def with_environment(self, variables: dict[str, str]) -> Cluster:
        """Return this cluster, whose commands also have these variables."""
        return dataclasses.replace(self, environment={**self.environment, **variables})

    def save(self) -> None:
        """Let the state file say this."""
        path = self.directory / "state.json"
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(dataclasses.asdict(self)))
        temporary.rename(path)


def load(name: str) -> Cluster:
    """Return the cluster as its state file says.

    Raises:
        ClusterError: there is none yet, or no more.
    """
    try:
        state = json.loads(Path(f"{PREFIX}{name}/state.json").read_text())
    except FileNotFoundError:
        raise ClusterError(f"cluster {name} is coming up or going down: try again") from None
    state["nodes"] = tuple(Node(**node) for node in state["nodes"])
    return Cluster(**state)


def try_lock(directory: Path) -> int | None:
    """Return a descriptor that holds the directory's lock; None when its supervisor holds it.

    Raises:
        FileNotFoundError: the directory is gone.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def clusters() -> list[str]:
    """Names of the clusters whose supervisor lives; what a crash left of others is removed."""
    names = []
    for directory in sorted(Path("/run").glob(Path(PREFIX).name + "*")):
        try:
            descriptor = try_lock(directory)
        except FileNotFoundError:
            continue
        if descriptor is None:
            names.append(directory.name.removeprefix(Path(PREFIX).name))
        else:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(descriptor)
    return names
