"""Signals that ask a job to leave, from before its start, and whoever waits for its launcher and cannot pass them on.

mpirun passes SIGUSR1 on to its ranks. horovodrun becomes `/bin/sh -c 'mpirun ...'`: a signal to its process id ends the
shell alone, and the job would run on without anybody who could end it. Ranks beside such a shell notice its end.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHELLS = ("sh", "dash", "bash", "ash", "busybox")


@contextmanager
def noticing(number: int) -> Iterator[list[int]]:
    """Collect signals `number` instead of dying of them: outside the loop there is nothing to stop, or little left."""
    came: list[int] = []
    before = signal.signal(number, lambda *_: came.append(number))
    try:
        yield came
    finally:
        signal.signal(number, before)


def follow_launching_shell() -> None:
    """Send this process SIGUSR1 when a shell ends that does nothing but wait for this rank's launcher.

    Does nothing where there is no such shell, or on a system that cannot tell.
    """
    launcher = os.getppid()
    shell = waiting_shell(launcher)
    if shell is not None:
        with suppress(OSError, AttributeError):  # AttributeError: a Python built for older kernels
            descriptor = os.pidfd_open(shell)
            threading.Thread(target=leave_after, args=(descriptor, launcher), name="launcher", daemon=True).start()


def waiting_shell(launcher: int) -> int | None:
    """Return the parent of `launcher` where it is a shell that runs mpirun and waits for it, else None."""
    with suppress(OSError, ValueError, IndexError):
        shell = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
        words = Path(f"/proc/{shell}/cmdline").read_text(errors="replace").split("\0")
        # What is started in the background outlives its shell on purpose.
        waits = words[1] == "-c" and words[2].startswith("mpirun ") and "&" not in words[2]
        return shell if waits and os.path.basename(words[0]) in SHELLS else None
    return None


def leave_after(descriptor: int, launcher: int) -> None:
    """Wait for the end of the process behind a pidfd, and leave if the launcher has not ended with it."""
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    os.close(descriptor)
    if os.getppid() == launcher:
        os.kill(os.getpid(), signal.SIGUSR1)
