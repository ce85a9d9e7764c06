"""What a run tells its user: lines on standard output and in the log, a bar or lines about how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_LOOKS = 0.5
LEAST_SHARE = 0.05
"""Of the steps, that must be made before the time of the others is estimated."""
WITHOUT_REST = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
"""Of tqdm's bar what is left out is how long the rest takes."""


class RunLogger:
    """Prints lines on rank 0 unless the run is quiet, and keeps them in a log.

    Until `log_to` names the log, lines wait for it: the run directory is made last. Standard output that takes no more,
    as on a full disk or a pipe whose reader has gone, does not end a run.
    """

    def __init__(self, *, rank: int, quiet: bool) -> None:
        self.logs, self.prints = rank == 0, rank == 0 and not quiet
        self._waiting: list[str] = []
        self._log: Callable[[str], None] = self._waiting.append

    def info(self, text: str) -> None:
        """Print a line, above the bar where there is one, and log it; lines below it are logged only."""
        if self.logs:
            self._log(text)
        if self.prints:
            with suppress(OSError):
                tqdm.write(encodable(text.partition("\n")[0]), file=sys.stdout)
                sys.stdout.flush()

    def log_to(self, log: Callable[[str], None]) -> None:
        """Call `log` with each line so far, and each to come."""
        self._log = log
        for text in self._waiting:
            log(text)


def encodable(text: str) -> str:
    """Return text that standard output can show; characters that its encoding lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Progress:
    """How far a run is: a bar on a terminal, else lines, after 30 seconds, 60 more, 90 more; nothing on ranks but 0.

    Args:
        logger: says the lines; None shows nothing.
        total: steps of the run, as is planned now.
        done: of them.
    """

    def __init__(self, logger: RunLogger | None = None, total: int = 0, *, done: int = 0) -> None:
        self._logger, self._first, self._lines = logger, done, 0
        self._start = self._last = time.monotonic()
        shows_bar = logger is not None and logger.prints and sys.stderr.isatty()
        self._bar: Any = None
        if shows_bar:
            self._bar = tqdm(
                total=total, initial=done, unit="step", dynamic_ncols=True, mininterval=SECONDS_BETWEEN_LOOKS
            )

    def step(self, done: int, total: int, note: str, *, even: bool = True) -> None:
        """Show how far training is, as a line when the last one is old enough.

        Where steps do not take the same time each, `even` is false, and how long the rest takes is not told.
        """
        now = time.monotonic()
        if self._bar is not None:
            self._bar.total, self._bar.bar_format = total, None if even else WITHOUT_REST
            self._bar.set_postfix_str(note, refresh=False)
            if done > self._bar.n:
                self._bar.update(done - self._bar.n)
            elif now - self._last >= SECONDS_BETWEEN_LOOKS:
                self._bar.refresh()
                self._last = now
        elif self._logger is not None and now - self._last >= SECONDS_BETWEEN_LINES * (1 + self._lines):
            rest, self._lines = "", self._lines + 1
            # What the first few steps took says little.
            if even and done > self._first and done - self._first >= LEAST_SHARE * (total - self._first):
                left = (now - self._start) / (done - self._first) * (total - done)
                rest = f" | {left / 60:.1f} min left"
            self._logger.info(f"step {done}/{total} | {note}{rest}")
            self._last = now

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
