"""One node of the local cluster: a process that is PID 1 of its own namespaces and runs sshd until it is killed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import namespaces

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "sshd"

# UsePAM and StrictModes off: the node has no accounts but root, and the keys live outside a home directory.
SSHD_CONFIG = """\
ListenAddress {address}:22
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PidFile none
MaxStartups 100
SetEnv TMPDIR={directory}/local
"""


@dataclass(frozen=True)
class NodeSpec:
    """Properties of a node; addresses are IPv4, `directory` is the cluster's, `mtu` eth0's (0: the kernel's)."""

    name: str
    address: str
    bandwidth: str
    disk: str
    directory: str
    mtu: int = 0


def start_node(spec: NodeSpec, connect: Callable[[int], None], *, inherited: tuple[int, ...]) -> tuple[int, int]:
    """Start a node and return it when it answers ssh: (PID of its keeper, a child of the caller; PID of its PID 1).

    Args:
        spec: the node.
        connect: called with the PID of a process in the node's namespaces; puts eth0 into them.
        inherited: descriptors that the node must not keep open.

    Raises:
        RuntimeError: the node could not be set up; with its own message.
    """
    to_node, from_caller = os.pipe()
    from_node, to_caller = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        for descriptor in (*inherited, from_caller, from_node):
            os.close(descriptor)
        _keep_node(spec, to_node, to_caller)
    for descriptor in (to_node, to_caller):
        os.close(descriptor)
    with os.fdopen(from_node, "r") as answers, os.fdopen(from_caller, "w") as orders:
        first = answers.readline().strip()
        if first.isdigit():
            connect(int(first))
            orders.write("go\n")
            orders.flush()
            last = answers.readline().strip()
            if last == "ready":
                return keeper, int(first)
            first = last
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    raise RuntimeError(f"{spec.name}: {first or 'ended while starting'}")


def _keep_node(spec: NodeSpec, orders: int, answers: int) -> None:
    """Create the namespaces, fork the node into them and end with it."""
    try:
        namespaces.die_with_parent(signal.SIGKILL)
        namespaces.unshare(namespaces.NEW_NODE)
        node = os.fork()
        if node == 0:
            namespaces.die_with_parent(signal.SIGKILL)
            os.read(orders, 3)
            sshd = _set_up(spec)
            os.write(answers, b"ready\n")
            os.close(answers)
            # PID 1 inherits and must reap every orphan; when it returns, the kernel kills all that is left.
            while os.waitpid(-1, 0)[0] != sshd:
                pass
            os._exit(0)
        os.write(answers, f"{node}\n".encode())
        os.close(answers)
        os.waitpid(node, 0)
    except BaseException as error:
        os.write(answers, f"{error}\n".encode())
        os._exit(1)
    os._exit(0)


def _set_up(spec: NodeSpec) -> int:
    """Make this process's namespaces a node: host name, private directories, eth0, sshd; return sshd's PID."""
    socket.sethostname(spec.name)
    _mount(spec)
    Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    for line in (
        "ip link set lo up",
        f"ip address add {spec.address}/24 dev eth0",
        *([f"ip link set eth0 mtu {spec.mtu}"] if spec.mtu else []),
        "ip link set eth0 up",
        *limit("eth0", spec.bandwidth),
    ):
        run(line)
    config = Path("/run/sshd_config")
    config.write_text(SSHD_CONFIG.format(address=spec.address, directory=spec.directory))
    Path("/run/sshd").mkdir(mode=0o755)
    with open("/run/sshd.log", "w") as log:
        sshd = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    _wait_for_ssh(spec.address, sshd)
    return sshd.pid


def _mount(spec: NodeSpec) -> None:
    """Make private what two machines do not share: /run, /dev/shm, processes, interfaces, names, ssh, a disk."""
    directory = spec.directory
    descriptor = os.open(directory, os.O_PATH)
    namespaces.keep_mounts_private()
    namespaces.mount("tmpfs", "/run", options="mode=755,size=64m")
    os.makedirs(directory, mode=0o700)
    namespaces.bind(f"/proc/self/fd/{descriptor}", directory)
    os.close(descriptor)
    namespaces.mount("proc", "/proc")
    namespaces.mount("sysfs", "/sys")
    namespaces.mount("tmpfs", "/dev/shm", options="mode=1777")
    namespaces.mount("tmpfs", f"{directory}/local", options=f"mode=1777,size={spec.disk}")
    namespaces.bind(f"{directory}/hosts", "/etc/hosts")
    namespaces.bind(f"{directory}/ssh_config", "/etc/ssh/ssh_config")
    # sshd refuses an account whose password field says locked, which images differ in.
    namespaces.bind(f"{directory}/shadow", "/etc/shadow")
    own_ssh = f"{pwd.getpwuid(0).pw_dir}/.ssh"
    if os.path.isdir(own_ssh):
        namespaces.mount("tmpfs", own_ssh, options="mode=700")


def _wait_for_ssh(address: str, sshd: subprocess.Popen[bytes]) -> None:
    """Wait until sshd accepts connections.

    Raises:
        RuntimeError: it ended or did not answer; with the end of its log.
    """
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and sshd.poll() is None:
        try:
            socket.create_connection((address, 22), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    log = Path("/run/sshd.log").read_text().strip().splitlines()
    raise RuntimeError(f"sshd did not start: {log[-1] if log else 'no message'}")


def limit(interface: str, bandwidth: str) -> list[str]:
    """Return the commands that limit the rate of `interface` to `bandwidth` (tc's notation; "" for no limit)."""
    return [f"tc qdisc add dev {interface} root tbf rate {bandwidth} burst 256kb latency 100ms"] if bandwidth else []


def run(line: str) -> None:
    """Run one command without a shell.

    Raises:
        RuntimeError: it failed; with its own message.
    """
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"`{line}` failed: {done.stderr.strip()}")
