"""Clusters of several nodes on this machine: start, run commands, count bytes, stop.

A cluster is one supervisor process; see `cluster_supervisor`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import cluster_node
import guard
import namespaces
from cluster_state import PREFIX, Cluster, ClusterError, Node, Plan, clusters, load, try_lock
from cluster_supervisor import ENDING, supervise

LAUNCH = Path(__file__).resolve().parent
SSHD_USER = "sshd"
"""The user that sshd needs. While its package is being installed, the program exists before the user does."""


def missing() -> list[str]:
    """Return what this machine lacks for a cluster, with remedies; empty if nothing is missing."""
    if os.geteuid() != 0:
        return ["namespaces and a bridge need root; start it with sudo"]
    lacking = [
        f"{program} is missing; run apt-get install {package}"
        for program, package in (
            ("ip", "iproute2"),
            ("tc", "iproute2"),
            (cluster_node.SSHD, "openssh-server"),
            ("ssh", "openssh-client"),
            ("ssh-keygen", "openssh-client"),
        )
        if shutil.which(program) is None
    ]
    if not lacking and not _has_user(SSHD_USER):
        lacking.append(f"the user {SSHD_USER} of sshd is missing; run apt-get install --reinstall openssh-server")
    if not lacking and (refusal := namespaces.refusal()):
        lacking.append(refusal)
    return lacking


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _claim(name: str | None) -> tuple[str, int]:
    """Create a new, locked state directory: (the cluster's name, the descriptor that holds the lock)."""
    clusters()
    for candidate in [name] if name else (f"c{number}" for number in range(1000)):
        directory = Path(PREFIX + candidate)
        try:
            directory.mkdir(mode=0o700)
            descriptor = try_lock(directory)
        except FileExistsError:
            continue
        except FileNotFoundError:
            descriptor = None
        # A sweep of stale directories may come between mkdir and the lock; then this one was taken for stale.
        if descriptor is not None and directory.exists() and os.stat(directory).st_ino == os.fstat(descriptor).st_ino:
            return candidate, descriptor
    raise ClusterError(
        f"cluster {name!r} is already up; choose another --name, or run `launch/cluster down --name {name}`"
    )


def up(plan: Plan, *, name: str | None = None, owner: int | None = None) -> Cluster:
    """Return a cluster whose nodes all answer ssh; it runs until `down`, or until the process `owner` ends.

    Raises:
        ClusterError: something is missing, the name is taken, or a node did not start; nothing is left then.
    """
    if lacking := missing():
        raise ClusterError("; ".join(lacking))
    # An interruption waits until somebody is there who removes what has begun.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        name, lock = _claim(name)
        reader, writer = os.pipe()
        caller = os.getpid()
        supervisor = os.fork()
        if supervisor == 0:
            os.close(reader)
            supervise(name, plan, caller, owner, lock=lock, answers=writer)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        raise
    os.close(writer)
    os.close(lock)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        with os.fdopen(reader, "r") as answers:
            answer = answers.read().strip()
    except BaseException:
        os.kill(supervisor, signal.SIGTERM)
        os.waitpid(supervisor, 0)
        raise
    if answer != "ready":
        os.waitpid(supervisor, 0)
        raise ClusterError(answer or "the supervisor ended during start-up")
    return load(name)


def down(name: str) -> None:
    """End the cluster and all processes in it; do nothing if it is not up."""
    number, patience = signal.SIGTERM, 0.0
    while name in clusters():
        if time.monotonic() > patience:
            try:
                os.kill(load(name).supervisor, number)
                number = signal.SIGKILL
            except (ClusterError, ProcessLookupError):
                pass
            patience = time.monotonic() + 10
        time.sleep(0.02)


def cut_power(cluster: Cluster, name: str) -> None:
    """Kill the node and all processes in it; its link goes first, so that no peer is notified."""
    node = cluster.node(name)
    child = os.fork()
    if child == 0:
        namespaces.enter(cluster.supervisor, ("net",))
        cluster_node.run(f"ip link set port{cluster.nodes.index(node)} down")
        os._exit(0)
    os.waitpid(child, 0)
    os.kill(node.pid, signal.SIGKILL)
    while load(cluster.name).nodes[cluster.nodes.index(node)].pid:
        time.sleep(0.02)


def traffic(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Return the bytes that each living node's eth0 has (sent, received) since it came up."""
    counted = {}
    for node in cluster.nodes:
        try:
            lines = Path(f"/proc/{node.pid}/net/dev").read_text().splitlines() if node.pid else []
        except OSError:
            # The node has just ended.
            continue
        # A node that loses its link is about to end.
        for fields in (line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")):
            counted[node.name] = (int(fields[8]), int(fields[0]))
    return counted


def run(cluster: Cluster, node: Node, command: Sequence[str]) -> int:
    """Run `command` on the node with launch/settings.sh and the environment that it passes; return its exit code.

    Signals are passed on to the command; when this process ends, so does the command.
    """
    local = f"{cluster.directory}/local"
    environment = {**os.environ, **cluster.environment, "TMPDIR": local, "PATH": _path()}
    # The nodes share the cores of this machine, which each of them believes to own.
    environment.setdefault("HVFREEZE_CORES", str(max(1, len(os.sched_getaffinity(0)) // len(cluster.nodes))))
    script = '. "$1"; hvfreeze_settings "$2"; shift 2; hvfreeze_exec "$@"'
    words = ["bash", "-c", script, "bash", str(LAUNCH / "settings.sh"), str(cluster.slots), *command]
    directory = os.getcwd()

    def enter() -> None:
        namespaces.enter(node.pid, ("net", "uts", "ipc", "mnt"))
        os.chdir(directory)

    namespaces.enter(node.pid, ("pid",))
    # The second guard is inside the node's PID namespace, where the command's orphans are.
    return guard.run([sys.executable, guard.__file__, *words], environment=environment, prepare=enter).code


def call(node: Node, command: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Return the output of `command` on the node; unlike after `run`, daemons that it started stay."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    words = [sys.executable, str(LAUNCH / "namespaces.py"), str(node.pid), *command]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PATH": path, **environment})


def _path() -> str:
    """Return PATH, with the environment of `make setup` first unless another one is active."""
    own = LAUNCH.parent / ".venv" / "bin"
    path = os.environ.get("PATH", os.defpath)
    return path if "VIRTUAL_ENV" in os.environ or not own.is_dir() else f"{own}:{path}"
