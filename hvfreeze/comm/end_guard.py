"""Kills a rank that is suspended after it has left the other ranks, so that the launcher does not wait forever.

The other ranks may have ended by then, and a suspended process cannot act. So a rank that is about to leave MPI starts
this file as a child process, which ends with the rank. The child is in the rank's process group, so signals to the
group reach both.

    python -S end_guard.py RANK LIMIT_SECONDS PROCESS      standard input: a pipe that only PROCESS holds open
"""

from __future__ import annotations

import os
import select
import sys
import time

# Every rank starts this file at its end, and imports take most of its time, so functions import what they need.

LOOK_SECONDS = 0.5
MOST_SECONDS = 2.0
"""Longest time that one poll may count, in seconds: a watch that was suspended too does not know the rank's state."""
SPEAK_SECONDS = 6.0
"""Seconds after the limit: later than ranks that still wait and can name the suspended rank, earlier than the
others."""


def guard_end(rank: int, limit_seconds: float) -> None:
    """Start a process that kills this one if it is suspended for `limit_seconds` plus SPEAK_SECONDS; 0 starts none.

    Does nothing if no process can be started, because the job's work is already done.
    """
    import signal
    from contextlib import suppress

    if limit_seconds <= 0:
        return
    with suppress(OSError):
        # The write end stays open and unused; the kernel closes it when this process ends.
        reader, _ = os.pipe()
        # No fork: it would copy all page tables, and locks that other threads hold.
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-S", __file__, str(rank), str(limit_seconds), str(os.getpid())],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)],
            # These signals reach the whole process group. They ask ranks to leave, and would end the guard.
            setsigmask=[signal.SIGUSR1, signal.SIGINT],
        )
        os.close(reader)


def watch(rank: int, limit_seconds: float, process: int) -> None:
    """Watch the parent `process` until it ends; kill it if it is suspended for too long."""
    stopped, before = 0.0, time.monotonic()
    while os.getppid() == process and not select.select([0], [], [], LOOK_SECONDS)[0]:
        now = time.monotonic()
        stopped = stopped + min(now - before, MOST_SECONDS) if is_stopped(process) else 0.0
        before = now
        if stopped > limit_seconds + SPEAK_SECONDS:
            import signal

            print(
                f"hvfreeze: error: rank {rank} on {os.uname().nodename} has left MPI, but has been suspended for "
                f"{stopped:.0f} s, and the launcher waits for it; it is killed now; "
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS sets the limit",
                file=sys.stderr,
                flush=True,
            )
            os.kill(process, signal.SIGKILL)
            return


def is_stopped(process: int) -> bool:
    """Return True if a process is stopped by a signal or a debugger; False if its state cannot be read."""
    try:
        # Read bytes: the kernel truncates the name to 15 bytes, which may split a character.
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in b"tT"
    except OSError:
        return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
