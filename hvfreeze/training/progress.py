"""What a run tells its user: lines on standard output and in the log, and a bar or lines about how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0


class Speaker:
    """Says lines: prints them on rank 0 unless the run is quiet, and keeps them in a log.

    Until `log_to` names the log, lines wait for it: the run directory is made last. Standard output that takes no more,
    as on a full disk or a pipe whose reader has gone, does not end a run.
    """

    def __init__(self, *, rank: int, quiet: bool) -> None:
        self.speaks, self.prints = rank == 0, rank == 0 and not quiet
        self._waiting: list[str] = []
        self._log: Callable[[str], None] = self._waiting.append

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one, and log it."""
        if self.speaks:
            self._log(text)
        if self.prints:
            with suppress(OSError):
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()

    def log_to(self, log: Callable[[str], None]) -> None:
        """Keep what was said, and what will be, by calling `log` with each line."""
        self._log = log
        for text in self._waiting:
            log(text)


class Silence:
    """What every rank but 0 shows: nothing."""

    def expect(self, total: int) -> None:
        """Show nothing."""

    def step(self, done: int, note: str) -> None:
        """Show nothing."""

    def line(self, text: str) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Nothing is open."""


class Lines:
    """Plain lines, for logs and for launchers that tag each line: at most one in `SECONDS_BETWEEN_LINES`."""

    def __init__(self, speaker: Speaker, total: int, *, done: int = 0) -> None:
        self._speaker, self._total, self._first = speaker, total, done
        self._start = self._last = time.monotonic()

    def expect(self, total: int) -> None:
        """Expect so many steps in all."""
        self._total = total

    def step(self, done: int, note: str) -> None:
        """Say how far training is, when the last line is old enough."""
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES and done > self._first:
            left = (now - self._start) / (done - self._first) * (self._total - done)
            self._speaker.say(f"step {done}/{self._total} | {note} | {left / 60:.1f} min left")
            self._last = now

    def line(self, text: str) -> None:
        """Say a line."""
        self._speaker.say(text)

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """A bar with the time left, for a terminal."""

    def __init__(self, speaker: Speaker, total: int, *, done: int = 0) -> None:
        self._speaker = speaker
        self._bar: Any = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, mininterval=0.5)

    def expect(self, total: int) -> None:
        """Expect so many steps in all."""
        self._bar.total = total

    def step(self, done: int, note: str) -> None:
        """Move the bar."""
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def line(self, text: str) -> None:
        """Say a line, above the bar."""
        self._speaker.say(text)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


Progress = Silence | Lines | Bar


def open_progress(speaker: Speaker, total: int, *, done: int) -> Progress:
    """Return what a rank shows while `total` steps are made, `done` of which are already."""
    if not speaker.speaks:
        return Silence()
    shows_bar = speaker.prints and sys.stderr.isatty()
    return Bar(speaker, total, done=done) if shows_bar else Lines(speaker, total, done=done)
