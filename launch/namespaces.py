"""Linux namespaces through the C library, because Python 3.10 does not offer them.

python3 namespaces.py PID COMMAND...        runs COMMAND in the namespaces of PID
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

# Flags of Linux's unshare(2).
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000
NEW_NODE = 0x00020000 | 0x04000000 | 0x08000000 | NEW_PIDS | NEW_NETWORK  # and mounts, host name, IPC

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(kinds: int) -> None:
    """Give the calling process new namespaces of these kinds (a new PID namespace holds its next child)."""
    _checked(_libc.unshare(kinds), "unshare")


def enter(pid: int, kinds: tuple[str, ...]) -> None:
    """Move the calling process into the namespaces of `pid`.

    Args:
        pid: as the caller counts.
        kinds: names under /proc/PID/ns; "pid" moves only the children of the caller.
    """
    descriptors = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    for descriptor, kind in zip(descriptors, kinds, strict=True):
        _checked(_libc.setns(descriptor, 0), f"setns {kind}")
        os.close(descriptor)


def die_with_parent(number: signal.Signals) -> None:
    """Send the calling process this signal when its parent ends for any reason."""
    _checked(_libc.prctl(1, int(number), 0, 0, 0), "prctl")  # PR_SET_PDEATHSIG


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _checked(_libc.prctl(1, 0, 0, 0, 0), "prctl")  # PR_SET_PDEATHSIG


def wake_on_time() -> None:
    """Wake the calling process at the requested time; by default the kernel may take 50 microseconds more."""
    _checked(_libc.prctl(29, 1, 0, 0, 0), "prctl")  # PR_SET_TIMERSLACK


def keep_mounts_private() -> None:
    """Keep further mounts in this mount namespace; the host's later mounts still appear in it."""
    _checked(_libc.mount(None, b"/", None, 1 << 14 | 1 << 19, None), "mount --make-rslave /")  # MS_REC | MS_SLAVE


def mount(kind: str, target: str, *, options: str = "") -> None:
    """Cover `target` with a new file system of this kind ("tmpfs", "proc", "sysfs")."""
    data = options.encode() or None
    _checked(_libc.mount(kind.encode(), target.encode(), kind.encode(), 0, data), f"mount {kind} on {target}")


def bind(source: str, target: str) -> None:
    """Show the file or directory `source` at `target`."""
    # MS_BIND
    _checked(_libc.mount(source.encode(), target.encode(), None, 1 << 12, None), f"bind {source} on {target}")


def refusal() -> str:
    """Return why a node cannot be created on this machine, tried in a child that leaves nothing; "" if it can."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        message = ""
        try:
            unshare(NEW_NODE & ~NEW_PIDS)
            for line in (
                "ip link add switch type bridge",
                "ip link add port type veth peer name eth0",
                "tc qdisc add dev port root tbf rate 1gbit burst 256kb latency 100ms",
            ):
                done = subprocess.run(line.split(), capture_output=True, text=True)
                if done.returncode != 0:
                    message = f"the kernel rejects `{line}`: {done.stderr.strip()}"
                    break
            unshare(NEW_PIDS)
        except OSError as error:
            message = f"the kernel rejects new namespaces ({error.strerror}); a container needs --privileged"
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        message = stream.read().decode()
    os.waitpid(child, 0)
    return message


if __name__ == "__main__":
    enter(int(sys.argv[1]), ("pid", "net", "uts", "ipc", "mnt"))
    sys.exit(subprocess.run(sys.argv[2:]).returncode)
