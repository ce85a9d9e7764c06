"""A network link with latency: a process that carries Ethernet frames between two interfaces, each after a delay.

Kernels without netem have no queue with a delay. Frames of up to 64 KB keep the work of carrying them small.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections import deque

import namespaces

TUN = "/dev/net/tun"
MTU = 65000
MOST_AT_ONCE = 16
"""Frames read before due frames are sent, because an unlimited sender would keep the link reading."""
MOST_WAITING = 4096
"""Frames queued in one direction; further ones are lost, as in a switch whose buffer is full."""
WAKING = 50e-6
"""Seconds before a frame is due from which the link polls the clock instead of sleeping, because waking takes time."""


def refusal() -> str:
    """Return why there can be no such link on this machine, "" if there can."""
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        return f"--latency needs {TUN} ({error.strerror}); run modprobe tun; in a container, add --device {TUN}"
    return ""


def start_link(port: str, node: int, seconds: float, *, inherited: tuple[int, ...]) -> int:
    """Create interface `port` here and eth0 in the namespaces of process `node`, joined by a link; return its PID.

    The link is a child of the caller, and ends with it.

    Args:
        port: interface of the calling process's network.
        node: PID as the caller counts.
        seconds: latency of a frame, in either direction.
        inherited: descriptors that the link must not keep open.

    Raises:
        RuntimeError: the interfaces cannot be created.
    """
    reader, writer = os.pipe()
    wire = os.fork()
    if wire == 0:
        try:
            namespaces.die_with_parent(signal.SIGKILL)
            namespaces.wake_on_time()
            for descriptor in (*inherited, reader):
                os.close(descriptor)
            near = open_interface(port)
            namespaces.enter(node, ("net",))
            far = open_interface("eth0")
            os.write(writer, b"ready")
            os.close(writer)
            carry(near, far, seconds)
        except BaseException as error:
            os.write(writer, f"{error}".encode())
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "r") as answers:
        answer = answers.read()
    if answer != "ready":
        raise RuntimeError(f"wire of {port}: {answer or 'ended while starting'}")
    return wire


def open_interface(name: str) -> int:
    """Return a descriptor that reads what the new interface sends, and writes what it receives."""
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    # TUNSETIFF; IFF_TAP | IFF_NO_PI
    fcntl.ioctl(descriptor, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x0002 | 0x1000))
    return descriptor


def carry(near: int, far: int, seconds: float) -> None:
    """Carry frames between both descriptors forever."""
    other = {near: far, far: near}
    waiting: dict[int, deque[tuple[float, bytes]]] = {near: deque(), far: deque()}
    while True:
        due = min((frames[0][0] for frames in waiting.values() if frames), default=None)
        patience = None if due is None else max(0.0, due - time.monotonic() - WAKING)
        ready, _, _ = select.select([near, far], [], [], patience)
        for descriptor in ready:
            receive(descriptor, waiting[other[descriptor]], seconds)
        now = time.monotonic()
        for descriptor, frames in waiting.items():
            while frames and frames[0][0] <= now:
                send(descriptor, frames.popleft()[1])


def receive(descriptor: int, frames: deque[tuple[float, bytes]], seconds: float) -> None:
    """Read the frames that an interface has sent, up to MOST_AT_ONCE."""
    for _ in range(MOST_AT_ONCE):
        try:
            frame = os.read(descriptor, 65536)
        except OSError:  # nothing more, or the interface is down
            return
        if len(frames) < MOST_WAITING:
            frames.append((time.monotonic() + seconds, frame))


def send(descriptor: int, frame: bytes) -> None:
    """Deliver a frame to an interface; one that is down receives none."""
    try:
        os.write(descriptor, frame)
    except OSError:
        return
