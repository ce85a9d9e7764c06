"""Whether caching pays, from measured seconds: a pure function of what all ranks have measured.

It only chooses what cannot change results. A type or number of views that would help is printed as advice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvfreeze.cache.rates import Rates

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What one rank has measured and knows; seconds are per batch.

    Attributes:
        image_seconds: loading and augmenting the images that the prefix needs.
        prefix_seconds: forward of the prefix.
        suffix_seconds: the rest of the training step, behind which reading ahead and writing can hide.
        batch_rows: rows of a batch.
        rows: samples of this rank.
        views: views of each sample.
        row_bytes: bytes of one stored row.
        rows_present: rows (sample, view) that are cached already.
        rows_rewritten: those of them that lie in the file which is to be completed, and is written anew for that.
        epochs_left: from now on, as a fraction.
        epochs_until_move: until the cut is expected to move again; infinity when it is fixed.
        memory_bytes: that the page cache may take for this rank.
        rates: of this rank's cache directory.
    """

    image_seconds: float
    prefix_seconds: float
    suffix_seconds: float
    batch_rows: int
    rows: int
    views: int
    row_bytes: int
    epochs_left: float
    memory_bytes: int
    rates: Rates
    rows_present: int = 0
    rows_rewritten: int = 0
    epochs_until_move: float = math.inf

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows of this rank."""
        return self.rows * self.views * self.row_bytes

    @property
    def rows_missing(self) -> int:
        """Rows that are not cached yet."""
        return max(0, self.rows * self.views - self.rows_present)

    @property
    def new_bytes(self) -> int:
        """Bytes that completing the cache allocates; none where it is complete."""
        return (self.rows_missing + self.rows_rewritten) * self.row_bytes if self.rows_missing else 0

    @property
    def compute_seconds(self) -> float:
        """What a batch costs without the cache and is spared with it."""
        return self.image_seconds + self.prefix_seconds

    @property
    def read_seconds(self) -> float:
        """What reading a batch adds to a step: the core that it takes, and what reading ahead cannot hide."""
        batch_bytes = self.batch_rows * self.row_bytes
        total = self.rates.read_warm if self.num_bytes <= self.memory_bytes else self.rates.read_cold
        waiting = (total - self.rates.read_cpu) * batch_bytes
        return self.rates.read_cpu * batch_bytes + max(0.0, waiting - self.suffix_seconds)

    @property
    def write_seconds(self) -> float:
        """What storing a batch adds to a step, in the same way."""
        batch_bytes = self.batch_rows * self.row_bytes
        waiting = (self.rates.write - self.rates.write_cpu) * batch_bytes
        hidden_behind = self.suffix_seconds + self.compute_seconds
        return self.rates.write_cpu * batch_bytes + max(0.0, waiting - hidden_behind)


@dataclass(frozen=True)
class Plan:
    """The decision for one cut; equal on all ranks because it is computed once.

    Attributes:
        use: whether to cache.
        fits: whether disk and budget hold the rows.
        fill: while training, or in a sweep before it.
        predicted_seconds_saved: of the time from now on, at the slowest rank; may be negative.
        reason: one clause.
        rows: (quantity, value) of the printed table, advice last.
    """

    use: bool
    fits: bool
    fill: Literal["training", "sweep"]
    predicted_seconds_saved: float
    reason: str
    rows: tuple[tuple[str, str], ...]

    def table(self) -> str:
        """Return the rows as text, one a line."""
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows)


def make_plan(ranks: Sequence[Situation], *, limit_bytes: int | None = None) -> Plan:
    """Return the plan for the situations of all ranks.

    Args:
        ranks: one each; ranks wait for each other, so the slowest counts.
        limit_bytes: what the budget still allows for new rows, all ranks together; None is unlimited.
    """
    without, while_training, in_sweep = (max(seconds) for seconds in zip(*map(_seconds, ranks)))
    # Training would stand still for a sweep, on the strength of a guess how long the cut stays: it only completes.
    fill: Literal["training", "sweep"] = "training"
    if in_sweep < while_training and any(rank.rows_present for rank in ranks):
        fill = "sweep"
    saved = without - (in_sweep if fill == "sweep" else while_training)
    obstacle = _obstacle(ranks, limit_bytes=limit_bytes)
    fits, pays = not obstacle, saved > 0
    if obstacle:
        reason = obstacle
    elif pays:
        reason = f"saves {saved:.1f} s from here on"
    elif any(rank.epochs_until_move < rank.epochs_left for rank in ranks):
        reason = "the cut is likely to move before the rows are read again"
    else:
        reason = "reading and filling take longer than computing, in the epochs that are left"
    return Plan(
        use=fits and pays,
        fits=fits,
        fill=fill,
        predicted_seconds_saved=saved,
        reason=reason,
        rows=_table(ranks, saved=saved, reason=reason, limit_bytes=limit_bytes),
    )


def _seconds(rank: Situation) -> tuple[float, float, float]:
    """Return seconds for this prefix until the run ends: never cached, filled in training, filled before.

    A cut that moves on does not make its rows worthless: a deeper row is computed from them, once each view.
    """
    left, views = rank.epochs_left, rank.views
    stay = min(left, rank.epochs_until_move)
    steps = rank.rows // max(1, rank.batch_rows)
    missing = rank.rows_missing / max(1, rank.rows * views)
    filling = min(stay, views) if missing else 0.0
    # While training, a batch with one row missing is computed whole; a sweep computes the missing rows only, and then
    # every step reads.
    swept = missing * rank.rows * views / max(1, rank.batch_rows)
    trained_on = stay - filling + _read_after_the_move(rank, stay=stay, filled=filling if missing else views)
    swept_on = stay + _read_after_the_move(rank, stay=stay, filled=views)
    miss, verification = rank.compute_seconds + rank.write_seconds, rank.rows_present * rank.row_bytes * rank.rates.hash
    spared = rank.compute_seconds - rank.read_seconds
    never = steps * left * rank.compute_seconds
    return (
        never,
        never + steps * (filling * rank.write_seconds - trained_on * spared) + verification,
        never + swept * miss - steps * swept_on * spared + verification,
    )


def _read_after_the_move(rank: Situation, *, stay: float, filled: float) -> float:
    """Return the epochs after the cut's next move that begin with rows of this one, of which `filled` views are there.

    Where not all views were filled, those that were come again after as many epochs as there are views; of a view
    that was filled in part hardly a batch is whole.
    """
    first, whole = (stay, filled) if filled >= rank.views else (max(stay, rank.views), math.floor(filled))
    return max(0.0, min(rank.epochs_left, first + whole) - first)


def _obstacle(ranks: Sequence[Situation], *, limit_bytes: int | None) -> str:
    """Return why the rows cannot be stored, or nothing."""
    needed = sum(rank.new_bytes for rank in ranks)
    if limit_bytes is not None and needed > limit_bytes:
        return f"needs {needed / GIB:.2f} GiB, the budget leaves {limit_bytes / GIB:.2f}"
    by_filesystem: dict[str, list[Situation]] = defaultdict(list)
    for rank in ranks:
        by_filesystem[rank.rates.filesystem].append(rank)
    for place, group in by_filesystem.items():
        need, free = sum(rank.new_bytes for rank in group), min(rank.rates.free_bytes for rank in group)
        if need > free:
            return f"needs {need / GIB:.2f} GiB on {place}, which has {free / GIB:.2f} free"
    return ""


def _table(
    ranks: Sequence[Situation], *, saved: float, reason: str, limit_bytes: int | None
) -> tuple[tuple[str, str], ...]:
    slowest = max(ranks, key=lambda rank: rank.compute_seconds)
    needed = sum(rank.new_bytes for rank in ranks)
    rows = [
        ("images, ms a batch", f"{slowest.image_seconds * 1e3:.2f}"),
        ("frozen prefix, ms a batch", f"{slowest.prefix_seconds * 1e3:.2f}"),
        ("rest of the step, ms", f"{slowest.suffix_seconds * 1e3:.2f}"),
        ("reading, ms a batch", f"{max(rank.read_seconds for rank in ranks) * 1e3:.2f}"),
        ("storing, ms a batch", f"{max(rank.write_seconds for rank in ranks) * 1e3:.2f}"),
        ("epochs left, at this cut", f"{slowest.epochs_left:.1f}, {slowest.epochs_until_move:.1f}"),
        ("GiB to store, all ranks", f"{needed / GIB:.3f}"),
        ("GiB allowed", "no limit" if limit_bytes is None else f"{limit_bytes / GIB:.3f}"),
        ("seconds saved, predicted", f"{saved:.1f}"),
        ("decision", reason),
    ]
    rows += [("advice", advice) for advice in _advice(ranks, limit_bytes=limit_bytes)]
    return tuple(rows)


def _advice(ranks: Sequence[Situation], *, limit_bytes: int | None) -> list[str]:
    """Return what the user could choose; it would change results, so it is never chosen here."""
    advice = []
    needed = sum(rank.new_bytes for rank in ranks)
    does_not_fit = bool(_obstacle(ranks, limit_bytes=limit_bytes))
    if does_not_fit or any(rank.num_bytes > rank.memory_bytes for rank in ranks):
        advice.append(f"--cache-dtype float16 would need {needed / 2 / GIB:.3f} GiB if rows are float32 now")
    views = max(rank.views for rank in ranks)
    if views > 1 and (does_not_fit or any(rank.epochs_left <= 2 * rank.views for rank in ranks)):
        fewer = views // 2
        advice.append(f"--augment views:{fewer} would need {needed * fewer / views / GIB:.3f} GiB and fill sooner")
    return advice
