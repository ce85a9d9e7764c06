"""A process that has loaded what ranks load, waits without using the processor, and copies itself for each that asks.

Started by pool.py with a listening socket; startup/handover.py asks, and startup/becoming.py is what a copy does. It is
the asking process in all that its program could notice: command, variables, folder, input, output, signals, exit code.
Nothing that a rank does reaches the next one. Loaded are PyTorch, what comes with it, and its compiler, which every
optimizer loads in its first step and which takes longer than all else; not the program itself, nor what opens files or
talks to other ranks: HDF5, Horovod and mpi4py. When its input ends, the tests are over, and so is this process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("startup")))

from becoming import Request, become, leave, run
from handover import circumstances


class Standing:
    """The waiting process: which copies there are, and who asked for them."""

    def __init__(self, listener: socket.socket, here: dict[str, str]) -> None:
        self._listener, self._here = listener, here
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        self._links: dict[int, socket.socket] = {}  # by the copy's pidfd
        self._copies: dict[int, int] = {}

    def wait(self) -> Request | None:
        """Return in a copy, with what it shall do; in the process itself None, when the tests are over."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    request = self._answer()
                    if request:
                        return request
                elif key.fd == sys.stdin.fileno():
                    self._end()
                    return None
                elif key.fd in self._copies:
                    self._report(key.fd)
                elif self._links.get(key.data) is key.fileobj:
                    # Who asked has ended, and nobody else knows of the copy.
                    signal.pidfd_send_signal(key.data, signal.SIGKILL)
                    self._selector.unregister(key.fileobj)

    def _answer(self) -> Request | None:
        link, _ = self._listener.accept()
        link.settimeout(10)
        _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        try:
            request = Request(link) if user == os.getuid() else None
        except (OSError, ValueError):
            request = None
        if request is None or request.content["circumstances"] != self._here:
            link.close()
            if request:
                request.close()
            return None
        copy = os.fork()
        if copy == 0:
            self._forget()
            link.close()
            return request
        request.close()
        with contextlib.suppress(OSError):  # when who asked has ended, the selector will say so
            link.sendall(json.dumps(copy).encode() + b"\n")
        pidfd = os.pidfd_open(copy)
        self._links[pidfd], self._copies[pidfd] = link, copy
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._selector.register(link, selectors.EVENT_READ, data=pidfd)
        return None

    def _report(self, pidfd: int) -> None:
        """Tell who asked how the copy ended."""
        link = self._links.pop(pidfd)
        _, status = os.waitpid(self._copies.pop(pidfd), 0)
        with contextlib.suppress(OSError):
            link.sendall(json.dumps(status).encode() + b"\n")
        for source in (link, pidfd):
            with contextlib.suppress(KeyError):
                self._selector.unregister(source)
        link.close()
        os.close(pidfd)

    def _end(self) -> None:
        """End all copies."""
        for pidfd, copy in self._copies.items():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitpid(copy, 0)

    def _forget(self) -> None:
        """Leave the other copies and the waiting to the process itself."""
        self._selector.close()
        self._listener.close()
        for pidfd, link in self._links.items():
            os.close(pidfd)
            link.close()


def main() -> None:
    os.setpgid(0, 0)
    # What this process and its copies have loaded by it need not be loaded by the processes that ask.
    if os.environ.get("LD_PRELOAD", "").endswith("/rest.so"):
        del os.environ["LD_PRELOAD"]
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        here = circumstances()
        for name in sys.argv[2:]:
            importlib.import_module(name)
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be copied"
        # Copies share all that nobody writes to, and collecting garbage writes.
        gc.collect()
        gc.freeze()
        request = Standing(listener, here).wait()
    if request is None:
        os._exit(0)
    leave(run(become(request)))


if __name__ == "__main__":
    main()
