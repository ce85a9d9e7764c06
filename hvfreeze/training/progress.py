"""Progress for a person who waits: a bar on a terminal, plain lines elsewhere, nothing on ranks other than 0."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0


class Silence:
    """What every rank but 0 shows: nothing."""

    def step(self, done: int, note: str) -> None:
        """Show nothing."""

    def line(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""


class Lines:
    """Plain lines, for logs and for launchers that tag each line: at most one in `SECONDS_BETWEEN_LINES`."""

    def __init__(self, total: int, *, done: int = 0) -> None:
        self._total, self._first = total, done
        self._start = self._last = time.monotonic()

    def step(self, done: int, note: str) -> None:
        """Say how far training is, when the last line is old enough."""
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES and done > self._first:
            left = (now - self._start) / (done - self._first) * (self._total - done)
            self.line(f"step {done}/{self._total} | {note} | {left / 60:.1f} min left")
            self._last = now

    def line(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """A bar with the time left, for a terminal."""

    def __init__(self, total: int, *, done: int = 0) -> None:
        self._bar: Any = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, mininterval=0.5)

    def step(self, done: int, note: str) -> None:
        """Move the bar."""
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.write(text, file=sys.stdout)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


Progress = Silence | Lines | Bar


def open_progress(rank: int, total: int, *, done: int) -> Progress:
    """Return what `rank` shows while `total` steps are made, `done` of which are already."""
    if rank != 0:
        return Silence()
    return Bar(total, done=done) if sys.stderr.isatty() else Lines(total, done=done)


def line_above_the_bar(text: str) -> None:
    """Print a line for the user, above a bar where there is one."""
    tqdm.write(text, file=sys.stdout)


def say_nothing(text: str) -> None:
    """Do nothing, as on every rank but 0."""
