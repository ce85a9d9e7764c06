"""Ends a rank that is stopped after it has left the others, when only the launcher still waits for it, without a limit.

The other ranks may be gone by then, and a stopped process can do nothing for itself. So a rank that is about to leave
MPI starts this file as a process of its own, which ends with the rank. It stands in the rank's process group: whoever
ends, stops or lets go on the group means both.

    python -S end_guard.py RANK LIMIT_SECONDS PROCESS      standard input: a pipe that PROCESS alone holds open
"""

from __future__ import annotations

import os
import select
import sys
import time

# Every rank starts this at its end: what it loads costs more than what it does, and is loaded where it is needed.

LOOK_SECONDS = 0.5
MOST_SECONDS = 2.0
"""What a look may count for at most: who was stopped together with its rank has not seen it stopped meanwhile."""
SPEAK_SECONDS = 6.0
"""After the limit: behind ranks that still wait and see for whom, before those that cannot see it."""


def guard_end(rank: int, limit_seconds: float) -> None:
    """Have this process ended when, from now on, it is stopped for `limit_seconds` (0: no guard) and SPEAK_SECONDS.

    Does nothing where no process can be started: that is no reason to end a job whose work is done.
    """
    import signal
    from contextlib import suppress

    if limit_seconds <= 0:
        return
    with suppress(OSError):
        # Nobody uses or closes the other end: the kernel does, when this process has ended.
        reader, _ = os.pipe()
        # No fork, which would copy tables of all memory, and locks that other threads hold.
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-S", __file__, str(rank), str(limit_seconds), str(os.getpid())],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)],
            # They come to the whole group, ask a rank to leave, and would end the guard.
            setsigmask=[signal.SIGUSR1, signal.SIGINT],
        )
        os.close(reader)


def watch(rank: int, limit_seconds: float, process: int) -> None:
    """Return when `process`, the parent, has ended, or has been ended here because it was stopped for too long."""
    stopped, before = 0.0, time.monotonic()
    while os.getppid() == process and not select.select([0], [], [], LOOK_SECONDS)[0]:
        now = time.monotonic()
        stopped = stopped + min(now - before, MOST_SECONDS) if is_stopped(process) else 0.0
        before = now
        if stopped > limit_seconds + SPEAK_SECONDS:
            import signal

            print(
                f"hvfreeze: error: rank {rank} on {os.uname().nodename} was stopped for {stopped:.0f} s after it had "
                "left MPI, its work done, and the launcher waits for it alone; it is killed; "
                "set HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
                file=sys.stderr,
                flush=True,
            )
            os.kill(process, signal.SIGKILL)
            return


def is_stopped(process: int) -> bool:
    """Tell whether a process is stopped, by a signal or a debugger; False where that cannot be read."""
    try:
        # Bytes: the kernel cuts a name at 15 of them, also within a letter.
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in b"tT"
    except OSError:
        return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
