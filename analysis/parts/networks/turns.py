"""Jobs that take turns on the same nodes. All but one are stopped as processes, so that no thread of theirs, such as
Horovod's, which never rests for long, takes a core meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from analysis.sweeps.launching import end
from hvfreeze.comm.end_guard import is_stopped
from hvfreeze.errors import RefusedError

LOOK_SECONDS = 0.02
SECONDS = 600.0
"""After which a job whose turn it is hangs."""


def leave_turn(folder: Path, job: str, rank: int, number: int) -> None:
    """Stop this process, a rank of `job`, until turn `number` is its own."""
    part = folder / f"{job}-{rank}.part"
    part.write_text(str(number), encoding="utf-8")
    part.rename(folder / f"{job}-{rank}")
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class Turns:
    """A job from the view of the process that gives the turns.

    Attributes:
        name: of the job, an argument of its ranks.
        folder: where ranks say which turn they wait for, another argument of theirs.
        size: how many ranks.
        process: the launcher.
    """

    name: str
    folder: Path
    size: int
    process: subprocess.Popen[bytes]

    def wait(self, number: int) -> None:
        """Return when all ranks wait for turn `number`.

        Raises:
            RefusedError: the job has ended, or hangs.
        """
        deadline = time.monotonic() + SECONDS
        while not self._all_wait(number):
            if self.process.poll() is not None:
                raise RefusedError(f"the job of {self.name} ended with code {self.process.returncode}")
            if time.monotonic() > deadline:
                raise RefusedError(f"the job of {self.name} hangs")
            time.sleep(LOOK_SECONDS)

    def advance(self) -> None:
        """Give all ranks their turn."""
        self._send(signal.SIGCONT)

    def conclude(self) -> None:
        """Give the last turn and return when the job has ended.

        Raises:
            RefusedError: it failed, or hangs.
        """
        self.advance()
        try:
            code = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise RefusedError(f"the job of {self.name} hangs") from None
        if code != 0:
            raise RefusedError(f"the job of {self.name} ended with code {code}")

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """Leave nothing of the job behind."""
        try:
            yield
        finally:
            end(self.process)
            self._send(signal.SIGKILL)

    def _all_wait(self, number: int) -> bool:
        said = [self.folder / f"{self.name}-{rank}" for rank in range(self.size)]
        if not all(path.exists() and path.read_text(encoding="utf-8") == str(number) for path in said):
            return False
        ranks = self._ranks()
        return len(ranks) == self.size and all(is_stopped(process) for process in ranks)

    def _send(self, number: signal.Signals) -> None:
        for process in self._ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def _ranks(self) -> list[int]:
        """Return the ranks' processes as this machine counts; as their nodes count, ranks know theirs alone."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().decode(errors="replace").split("\0")
                if words[1:2] == ["-m"] and {self.name, str(self.folder)} <= set(words):
                    found.append(int(path.parent.name))
        return found
