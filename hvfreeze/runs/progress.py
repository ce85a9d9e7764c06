"""Output for the user: log lines, and a progress bar or progress lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from hvfreeze.wording import in_time

SECONDS_BETWEEN_LINES, MOST_SECONDS_BETWEEN_LINES = 30.0, 600.0
SECONDS_BETWEEN_LOOKS = 0.5
WITHOUT_REST = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
"""tqdm's format without the remaining time."""


class RunLogger:
    """Prints lines on rank 0 unless the run is quiet, and appends them to a log.

    Until `log_to` sets the log, lines are buffered, because the run directory is created last. Closed or full standard
    output, such as a broken pipe, does not end a run.
    """

    def __init__(self, *, rank: int, quiet: bool) -> None:
        self.logs, self.prints = rank == 0, rank == 0 and not quiet
        self._waiting: list[str] = []
        self._log: Callable[[str], None] = self._waiting.append

    def info(self, text: str) -> None:
        """Print a line, above the bar if there is one, and log it; lines after a line end are logged only."""
        if self.logs:
            self._log(text)
        if self.prints:
            with suppress(OSError):
                tqdm.write(encodable(text.partition("\n")[0]), file=sys.stdout)
                sys.stdout.flush()

    def detail(self, text: str) -> None:
        """Log a line without printing it."""
        if self.logs:
            self._log(text)

    def log_to(self, log: Callable[[str], None]) -> None:
        """Call `log` with each previous line, and with each future one."""
        self._log = log
        for text in self._waiting:
            log(text)


def encodable(text: str) -> str:
    """Return text that standard output can encode; other characters are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Progress:
    """Progress of a run on rank 0: a bar on a terminal, else lines after 30 s, 60 s more, 120 s more, up to 10 minutes.

    Args:
        logger: prints the lines; None prints nothing.
        total: planned steps of the run.
        done: steps done.
    """

    def __init__(self, logger: RunLogger | None = None, total: int = 0, *, done: int = 0) -> None:
        self._logger, self._first, self._wait = logger, done, SECONDS_BETWEEN_LINES
        self._start = self._last = time.monotonic()
        shows_bar = logger is not None and logger.prints and sys.stderr.isatty()
        self._bar: Any = None
        if shows_bar:
            self._bar = tqdm(
                total=total, initial=done, unit="step", dynamic_ncols=True, mininterval=SECONDS_BETWEEN_LOOKS
            )

    def step(self, done: int, total: int, note: str, *, even: bool = True, estimated: bool = False) -> None:
        """Show the progress; as a line only if the last one is old enough.

        If the steps differ in duration, `even` is False, and a line has neither steps nor the remaining time. `total`
        may be an estimate.
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
        elif self._logger is not None and now - self._last >= self._wait:
            rest, self._wait = "", min(2 * self._wait, MOST_SECONDS_BETWEEN_LINES)
            # An estimate from the first 5 % of the steps would be too uncertain.
            if even and done > self._first and done - self._first >= 0.05 * (total - self._first):
                left = (now - self._start) / (done - self._first) * (total - done)
                rest = f"; {in_time(left)} left"
            steps = f"step {done} of {'about ' if estimated else ''}{total}, " if even else ""
            self._logger.info(f"{steps}{note}{rest}")
            self._last = now

    def close(self) -> None:
        """Leave the bar on the screen."""
        if self._bar is not None:
            self._bar.close()
