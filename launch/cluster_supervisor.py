"""The supervisor of a cluster: starts switch and nodes, watches them, and ends them when it ends.

The bridge is in the supervisor's own network namespace and every node in its own, so the host's network is never
changed and clusters cannot collide. When the supervisor ends for any reason, the kernel ends the nodes with everything
in them.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import cluster_link
import cluster_node
import namespaces
from cluster_state import PREFIX, Cluster, Node, Plan, load

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def supervise(name: str, plan: Plan, caller: int, owner: int | None, *, lock: int, answers: int) -> None:
    """Run the supervisor until its end; never returns."""
    directory = Path(PREFIX + name)
    code = 1
    try:
        for number in ENDING:
            signal.signal(number, _raise_interrupt)
        # Until it has answered, it must not survive the command that started it.
        namespaces.die_with_parent(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        if os.getppid() != caller:
            raise KeyboardInterrupt
        os.setsid()
        # Whoever reads the output of the command must not wait for the nodes.
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        cluster, keepers, wires = _start(name, plan, unwanted=(lock, answers))
        signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGCHLD})
        namespaces.outlive_parent()
        os.write(answers, b"ready")
        os.close(answers)
        _watch(cluster, keepers, wires, owner)
        code = 0
    except KeyboardInterrupt:
        os.write(answers, b"interrupted")
    except BaseException as error:
        os.write(answers, f"{error}".encode())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        # Its end is what ends the nodes.
        os._exit(code)


def _raise_interrupt(number: int, frame: object) -> None:
    # A second one must not interrupt the cleaning up.
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt


def _start(name: str, plan: Plan, *, unwanted: tuple[int, ...]) -> tuple[Cluster, dict[int, str], dict[int, str]]:
    """Start switch and nodes, and write them to the state file.

    Returns the cluster, and the names of nodes by the PIDs of their keepers, and of their links.
    """
    directory = Path(PREFIX + name)
    planned = [Node(f"node{index}", f"10.77.0.{11 + index}", 0) for index in range(plan.nodes)]
    _write_files(directory, planned)
    namespaces.unshare(namespaces.NEW_NETWORK)
    cluster_node.run("ip link add switch type bridge")
    cluster_node.run("ip link set switch up")
    nodes: list[Node] = []
    keepers: dict[int, str] = {}
    wires: dict[int, str] = {}
    for index, node in enumerate(planned):
        mtu = cluster_link.MTU if plan.latency else 0
        spec = cluster_node.NodeSpec(node.name, node.address, plan.bandwidth, plan.disk, str(directory), mtu)

        def connect(pid: int, port: str = f"port{index}", name: str = node.name) -> None:
            if plan.latency:
                # Two wires lie between two nodes.
                wires[cluster_link.start_link(port, pid, plan.latency / 2, inherited=unwanted)] = name
                cluster_node.run(f"ip link set {port} mtu {cluster_link.MTU}")
            else:
                cluster_node.run(f"ip link add {port} type veth peer name eth0 netns {pid}")
            cluster_node.run(f"ip link set {port} master switch up")
            # A port of a real switch limits both directions; the node's own end limits what it sends.
            for line in cluster_node.limit(port, plan.bandwidth):
                cluster_node.run(line)

        keeper, pid = cluster_node.start_node(spec, connect, inherited=unwanted)
        keepers[keeper] = node.name
        nodes.append(dataclasses.replace(node, pid=pid))
    cluster = Cluster(name, os.getpid(), plan.slots, plan.bandwidth, tuple(nodes), {}, plan.latency)
    cluster.save()
    return cluster, keepers, wires


def _watch(cluster: Cluster, keepers: dict[int, str], wires: dict[int, str], owner: int | None) -> None:
    """Wait until asked to stop or until the owner has ended; record nodes that die meanwhile.

    A node whose link ends is dead to all others, so it is ended too.
    """
    while owner is None or _lives(owner):
        received = signal.sigtimedwait({*ENDING, signal.SIGCHLD}, 0.5)
        if received is not None and received.si_signo != signal.SIGCHLD:
            return
        while keepers:
            dead, _ = os.waitpid(-1, os.WNOHANG)
            if dead == 0:
                break
            if dead in wires:
                for keeper, node in keepers.items():
                    if node == wires[dead]:
                        os.kill(keeper, signal.SIGKILL)
                continue
            name = keepers.pop(dead, "")
            state = load(cluster.name)
            nodes = tuple(dataclasses.replace(node, pid=0) if node.name == name else node for node in state.nodes)
            dataclasses.replace(state, nodes=nodes).save()


def _lives(pid: int) -> bool:
    try:
        # A zombie has ended too, although its PID is still taken.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _write_files(directory: Path, nodes: Sequence[Node]) -> None:
    """Create temporary keys, and what the nodes see as /etc/hosts, /etc/ssh/ssh_config and /etc/shadow."""
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", directory / key], check=True)
    (directory / "local").mkdir()
    host_key = (directory / "host_key.pub").read_text().strip()
    (directory / "hosts").write_text(
        "127.0.0.1 localhost\n" + "".join(f"{node.address} {node.name}\n" for node in nodes)
    )
    (directory / "known_hosts").write_text("".join(f"{node.name},{node.address} {host_key}\n" for node in nodes))
    (directory / "ssh_config").write_text(
        f"IdentityFile {directory}/user_key\nIdentitiesOnly yes\nBatchMode yes\nLogLevel ERROR\n"
        f"UserKnownHostsFile {directory}/known_hosts\nGlobalKnownHostsFile /dev/null\nStrictHostKeyChecking yes\n"
    )
    (directory / "shadow").touch(mode=0o600)
    (directory / "shadow").write_text("root:*:19000:0:99999:7:::\n")
