"""What a run tells its user: lines on standard output and in the log, a bar or lines about how far it is, curves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hvfreeze.errors import UsageError

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
        """Print a line, above the bar where there is one, and log it; lines below it are logged only."""
        if self.speaks:
            self._log(text)
        if self.prints:
            with suppress(OSError):
                tqdm.write(text.partition("\n")[0], file=sys.stdout)
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


def check_curves(*, wanted: bool) -> None:
    """Raise UsageError where --tensorboard is given and the library is not installed."""
    if wanted and find_spec("tensorboard") is None:
        raise UsageError(
            "--tensorboard needs the tensorboard library, which is not installed: pip install tensorboard, or leave "
            "it out; `hvfreeze report --watch` follows a run without it"
        )


class NoCurves:
    """A run without --tensorboard, and every rank but 0 of one with it."""

    def epoch(self, line: Mapping[str, Any], *, rate: float) -> None:
        """Draw nothing."""

    def close(self) -> None:
        """Nothing is open."""


class Curves:
    """An epoch's numbers as event files for TensorBoard, by optimizer step.

    Args:
        directory: where the files go.
        step: steps that a resumed run has made; what was drawn after them is taken back.
    """

    def __init__(self, directory: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory), purge_step=step + 1 if step else None)

    def epoch(self, line: Mapping[str, Any], *, rate: float) -> None:
        """Draw a line of metrics.jsonl, each number under its own name, those of phases and models in groups."""
        numbers = {"learning_rate": rate, **flattened(line)}
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=line["step"])
        self._writer.flush()

    def close(self) -> None:
        """Let go of the files."""
        self._writer.close()


def flattened(line: Mapping[str, Any], *, within: str = "") -> dict[str, float]:
    """Return the numbers in nested mappings, named by the way to them."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= flattened(value, within=f"{within}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key not in ("step", "epoch"):
            found[f"{within}{key}"] = float(value)
    return found
