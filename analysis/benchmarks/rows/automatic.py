"""`--cache auto` against the better of on and off, and what it predicts against what came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from unittest import mock

from torch import Tensor

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import Setting
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.runs import ProgramRun
from hvfreeze.cache.file.reader import MappedRows
from hvfreeze.config.cache import CacheConfig
from hvfreeze.config.freeze import FreezeConfig

BATCH_ROWS = 64
MIN_PAIRS = 3
MEGABYTE = 10**6
PREDICTION = "cache_predicted_saving"


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """One line of the table: what `auto` finds.

    Attributes:
        what: in words.
        cut: that is frozen from the start; 0 leaves it to `freeze`.
        epochs: of the run.
        steps: of an epoch.
        disk_rate: bytes per second of the cache directory; None is the disk as it is.
        limit: --cache-limit.
        freeze: how the cut moves.
    """

    what: str
    cut: int = 0
    epochs: int = 4
    steps: int = 12
    disk_rate: float | None = None
    limit: str = "none"
    freeze: FreezeConfig | None = None

    def disk(self) -> AbstractContextManager[object]:
        """Return a context in which every cache directory is as slow as this one."""
        if self.disk_rate is None:
            return nullcontext()
        rate = self.disk_rate
        read, write, slow = MappedRows.read, os.pwrite, ExitStack()

        def slow_read(mapped: MappedRows, rows: Tensor) -> Tensor:
            time.sleep(len(rows) * mapped.row_bytes / rate)
            return read(mapped, rows)

        def slow_write(descriptor: int, content: bytes | memoryview, offset: int) -> int:
            time.sleep(len(content) / rate)
            return write(descriptor, content, offset)

        slow.enter_context(mock.patch.object(MappedRows, "read", slow_read))
        slow.enter_context(mock.patch.object(os, "pwrite", slow_write))
        return slow


TABLE = {
    "cache_auto_cut4": Circumstances(what="cut 4, nothing special", cut=4),
    "cache_auto_slow_disk_cut1": Circumstances(
        what="cut 1, a disk of 4 MB/s", cut=1, epochs=3, steps=12, disk_rate=4 * MEGABYTE
    ),
    "cache_auto_slow_disk_cut5": Circumstances(
        what="cut 5, a disk of 30 MB/s", cut=5, steps=25, disk_rate=30 * MEGABYTE
    ),
    "cache_auto_tiny_budget": Circumstances(what="cut 5, a budget of 100 KB", cut=5, epochs=3, steps=50, limit="100K"),
    "cache_auto_last_epoch": Circumstances(what="cut 4, one epoch", cut=4, epochs=1, steps=60),
    "cache_auto_moving_cut": Circumstances(
        what="a cut that moves on schedule, every few steps", steps=8, freeze=FreezeConfig(freeze="linear")
    ),
}


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    setting = Setting.of(ranks, scratch, pace, batch_rows=BATCH_ROWS)
    for name, found in TABLE.items():
        predicts = PREDICTION in wanted and name == "cache_auto_cut4"
        if name in wanted or predicts:
            chosen = replace(setting, epochs=found.epochs, steps=2 if pace.quick else found.steps)
            with found.disk():
                rows = contest(ranks, name, chosen, found, pace, predicts=predicts)
            yield from (row for row in rows if row.name in wanted)


def contest(
    ranks: Ranks, name: str, setting: Setting, found: Circumstances, pace: Pace, *, predicts: bool
) -> list[Row]:
    """Compare in one set of circumstances. Collective: every rank must call this."""
    runs = {
        mode: ProgramRun(
            setting,
            f"{name}-{mode}",
            cut=found.cut,
            freeze=found.freeze,
            cache=CacheConfig(cache=mode, cache_limit=found.limit),
        )
        for mode in ("auto", "on", "off")
    }
    duels = [
        Duel(
            name=name,
            ours="auto",
            reference=("on", "off"),
            bound=1.05,
            what=f"run with --cache auto against the better of on and off: {found.what}, {found.epochs} epochs of "
            f"{setting.steps} steps, batch {setting.batch_rows}",
            describe=lambda medians: f"on {medians['on']:.2f} s, off {medians['off']:.2f} s",
        )
    ]
    if predicts:
        duels.append(prediction(runs["on"]))
    sides = [Side(mode, run.step, prepare=run.prepare) for mode, run in runs.items()]
    return hold(ranks, sides, duels, pace=pace.at_least(MIN_PAIRS))


def prediction(run: ProgramRun) -> Duel:
    """Return the row that compares seconds that were saved with what `run` said beforehand."""

    def predicted() -> float:
        return median(run.predicted_seconds)

    return Duel(
        name=PREDICTION,
        ours="on",
        reference="off",
        bound=1.15,
        ratio=lambda on, off: 1 + abs(predicted() / (off - on) - 1),
        what="1 + |seconds saved as predicted / as measured - 1|, cut 4",
        describe=lambda medians: (
            f"predicted {predicted():.2f} s, measured {medians['off'] - medians['on']:.2f} s, which is "
            f"{100 * (1 - medians['on'] / medians['off']):.0f} % of the run"
        ),
    )
