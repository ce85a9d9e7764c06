"""Ends the job if its ranks wait for each other too long, and names the ranks that they wait for.

Horovod's own stall inspector runs on rank 0 and is blocked with it. It does not see the start and end of MPI or the
point-to-point messages. Here every rank has a thread that knows what its rank waits for. If a rank has waited too long,
its thread asks those of the other ranks over a separate communicator: a stopped rank does not answer, and a computing
one says so.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvfreeze.comm.end_guard import LOOK_SECONDS, MOST_SECONDS, guard_end, is_stopped
from hvfreeze.comm.mpi_environment import claimed_rank
from hvfreeze.errors import StallError, UsageError
from hvfreeze.rules import float_or_nan

STALL_SECONDS = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
USUAL_SECONDS = "600"
# Seconds after the limit until this rank asks others, the lowest waiting rank reports, and any rank reports.
ASK_SECONDS, JUDGE_SECONDS, LAST_SECONDS = 1.0, 4.0, 8.0
QUESTION, ANSWER = 1, 2


def stall_limit() -> float:
    """Return the seconds for which a rank may wait for others, and set them in the environment; 0 is no limit.

    Raises:
        UsageError: the value in the environment is not a finite number of at least 0.
    """
    given = os.environ.setdefault(STALL_SECONDS, USUAL_SECONDS)
    seconds = float_or_nan(given)
    if not 0 <= seconds < math.inf:
        raise UsageError(f"${STALL_SECONDS} ({given}) must be a finite number of seconds, 0 or more; 0 means no limit")
    return seconds


class StallWatch:
    """Calls `abort` with the exit code after this rank has waited for others for `limit_seconds`; 0 is no limit."""

    def __init__(self, limit_seconds: float, abort: Callable[[int], None]) -> None:
        self._limit, self._abort = limit_seconds, abort
        self._name, self._since, self._lock = "", float("inf"), threading.Lock()
        self._comm: Any = None
        self._mpi: Any = None
        self._hosts: list[str] = []
        self._sent: list[Any] = []
        self._round, self._asked = 0, False
        self._answers: dict[int, tuple[str, float]] = {}
        if limit_seconds > 0:
            threading.Thread(target=self._watch, name="stall-watch", daemon=True).start()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Count the time inside the context as waiting in `name`; an outer wait continues afterwards."""
        before, waited = self._name, self._since < float("inf")
        self._name, self._since = name, time.monotonic()
        try:
            yield
        finally:
            # The other ranks have just taken part: the outer wait counts from here.
            self._since = time.monotonic() if waited else float("inf")
            self._name = before

    def connect(self, mpi: Any, comm: Any, hosts: list[str]) -> None:
        """Connect the threads over `comm`, which no other code uses; `hosts` has the host of every rank."""
        with self._lock:
            self._mpi, self._comm, self._hosts = mpi, comm, hosts
        # A script that does not close its world ends MPI when the interpreter exits, while this thread lives on.
        atexit.register(self.disconnect)

    def disconnect(self) -> None:
        """Make no more MPI calls; a child process watches this rank from now on, so other ranks need not."""
        with self._lock:
            left, self._comm = self._comm, None
        if left is not None:
            guard_end(claimed_rank(os.environ), self._limit)

    def _watch(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(LOOK_SECONDS)
            # The time for which this rank was stopped by a signal does not count as waiting.
            lost = time.monotonic() - before - LOOK_SECONDS
            self._since += lost if lost > MOST_SECONDS else 0.0
            with self._lock:
                if self._comm is not None:
                    self._listen()
                waited = time.monotonic() - self._since
                if waited < self._limit + ASK_SECONDS:
                    self._asked = False
                elif self._comm is None:
                    self._look_around(waited)
                else:
                    self._inquire(waited)

    def _look_around(self, waited: float) -> None:
        # Before `connect`, no rank can be asked. Ranks report in turn; a rank that sees a stopped one reports first.
        me, late = claimed_rank(os.environ), waited - self._limit
        stopped = stopped_here() if late > JUDGE_SECONDS else ""
        if late > (JUDGE_SECONDS if stopped else LAST_SECONDS) + LOOK_SECONDS * min(me, 4):
            self._end(waited, me, stopped or "other ranks")

    def _inquire(self, waited: float) -> None:
        me, size = self._comm.rank, self._comm.size
        if not self._asked:
            self._asked, self._answers = True, {}
            self._round += 1
            for rank in set(range(size)) - {me}:
                self._sent.append(self._comm.isend(self._round, dest=rank, tag=QUESTION))
        waiting = [rank for rank, (name, _) in self._answers.items() if name and rank < me]
        if waited > self._limit + (LAST_SECONDS if waiting else JUDGE_SECONDS):
            self._end(waited, me, self._culprits())

    def _listen(self) -> None:
        status = self._mpi.Status()
        while (message := self._comm.improbe(status=status)) is not None:
            content = message.recv()
            if status.tag == QUESTION:
                waited = time.monotonic() - self._since
                state = (self._name, waited) if waited > 0 else ("", 0.0)
                self._sent.append(self._comm.isend((content, *state), dest=status.source, tag=ANSWER))
            elif content[0] == self._round:
                self._answers[status.source] = content[1:]
        self._sent = [request for request in self._sent if not request.Test()]

    def _culprits(self) -> str:
        silent = sorted(set(range(self._comm.size)) - {self._comm.rank, *self._answers})
        busy = [rank for rank, (name, _) in sorted(self._answers.items()) if not name]
        if silent or busy:
            ranks = silent or busy
            what = "does not respond" if silent else "is computing or waits for something else"
            shown = ", ".join(f"{rank} on {self._hosts[rank]}" for rank in ranks[:8])
            return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if len(ranks) > 8 else ''}, which {what}"
        places = [f"rank {rank} waits in '{name}'" for rank, (name, _) in sorted(self._answers.items())]
        return f"other ranks, which wait too ({'; '.join(places)})"

    def _end(self, waited: float, rank: int, culprits: str) -> None:
        text = f"rank {rank} on {socket.gethostname()} has waited {waited:.0f} s in '{self._name}' for {culprits}"
        if first_to_speak():
            print(f"hvfreeze: error: {text}; {STALL_SECONDS} sets the limit", file=sys.stderr, flush=True)
        if self._comm is None:
            os._exit(StallError.exit_code)
        self._abort(StallError.exit_code)


def first_to_speak() -> bool:
    """Return True if no other rank of this job on this host has printed the message; True if that cannot be known.

    Taking turns is not enough, because ranks start to wait, and get a core, at different times.
    """
    # The launcher's folder for this job on this host, which it removes with the job.
    folder = os.environ.get("PMIX_SERVER_TMPDIR")
    if folder is None:
        return True
    try:
        Path(folder, f"hvfreeze-stall-{os.environ.get('PMIX_NAMESPACE')}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def stopped_here() -> str:
    """Return a phrase that names the stopped ranks of this job on this host; "" if there are none."""
    job, stopped = os.environ.get("PMIX_NAMESPACE"), set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if not entry.name.isdigit() or not is_stopped(int(entry.name)):
                continue
            pairs = (line.partition("=") for line in (entry / "environ").read_text(errors="replace").split("\0"))
            environ = {name: value for name, _, value in pairs}
            if job is not None and environ.get("PMIX_NAMESPACE") == job:
                stopped.add(claimed_rank(environ))
    named = ", ".join(map(str, sorted(stopped)))
    return f"rank{('s' if len(stopped) > 1 else '')} {named}, which does not respond" if stopped else ""
