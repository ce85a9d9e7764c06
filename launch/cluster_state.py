"""The state of the clusters on this machine: a directory under /run for each, locked by its supervisor."""

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
    """An error whose message the user sees instead of a traceback."""


@dataclass(frozen=True)
class Node:
    """A node as other processes see it; `pid` is its PID 1 as the host counts, 0 once the node is dead."""

    name: str
    address: str
    pid: int


@dataclass(frozen=True)
class Plan:
    """The properties of a cluster.

    `bandwidth` limits every node in both directions (tc's notation, "" for no limit), `slots` is the number of ranks
    per node, `disk` the size of its private $TMPDIR in memory. `latency` is the time of a message from node to node in
    seconds, in addition to that of the bandwidth; 0 for the kernel's.
    """

    nodes: int = 4
    slots: int = 1
    bandwidth: str = ""
    disk: str = "1g"
    latency: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """A running cluster; its state file is `directory`/state.json."""

    name: str
    supervisor: int
    slots: int
    bandwidth: str
    nodes: tuple[Node, ...]
    environment: dict[str, str]
    latency: float = 0.0

    @property
    def directory(self) -> Path:
        """Directory of its state, keys and settings."""
        return Path(PREFIX + self.name)

    @property
    def hosts(self) -> str:
        """The hosts as -H takes them: node0:1,node1:1,..."""
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
        raise ClusterError(
            f"cluster {self.name!r} has no node {name!r}; its nodes are {', '.join(n.name for n in self.nodes)}"
        )

    def with_environment(self, variables: dict[str, str]) -> Cluster:
        """Return this cluster, whose commands also have these variables."""
        return dataclasses.replace(self, environment={**self.environment, **variables})

    def save(self) -> None:
        """Write the state file."""
        path = self.directory / "state.json"
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(dataclasses.asdict(self)))
        temporary.rename(path)


def load(name: str) -> Cluster:
    """Read the cluster from its state file.

    Raises:
        ClusterError: there is none yet, or no more.
    """
    try:
        state = json.loads(Path(f"{PREFIX}{name}/state.json").read_text())
    except FileNotFoundError:
        raise ClusterError(f"cluster {name} is starting or stopping; try again") from None
    state["nodes"] = tuple(Node(**node) for node in state["nodes"])
    return Cluster(**state)


def try_lock(directory: Path) -> int | None:
    """Return a descriptor that holds the directory's lock; None if its supervisor holds it.

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
    """Return the names of the running clusters; remove what crashes have left of others."""
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
