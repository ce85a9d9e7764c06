"""Whether caching pays, from measured seconds: a pure function of what all ranks have measured.

It only chooses what cannot change results. A type or number of views that would help is printed as advice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvfreeze.cache.planning.forecast import Forecast, Ledger, forecast
from hvfreeze.cache.planning.situation import Situation

GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """The decision for one cut; equal on all ranks because it is computed once.

    Attributes:
        use: whether to cache.
        fits: whether disk and budget hold the rows.
        seconds_saved: predicted for a rank until the cut's next move, against computing every batch from images; the
            rows of a shallower cut count too. May be negative.
        seconds_saved_later: the same after that move, of rows that are there by then.
        rows_read: predicted until the cut's next move, of all ranks.
        rows_read_later: the same after that move.
        reason: one clause.
        rows: (quantity, value) of the printed table, advice last.
    """

    use: bool
    fits: bool
    seconds_saved: float
    seconds_saved_later: float
    rows_read: float
    rows_read_later: float
    reason: str
    rows: tuple[tuple[str, str], ...]

    @property
    def predicted_seconds_saved(self) -> float:
        """Seconds until the run ends."""
        return self.seconds_saved + self.seconds_saved_later

    def table(self) -> str:
        """Return the rows as text, one a line."""
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows)


def make_plan(ranks: Sequence[Situation], *, limit_bytes: int | None = None, asked: bool = False) -> Plan:
    """Return the plan for the situations of all ranks.

    Args:
        ranks: one each; ranks wait for each other, so the slowest counts.
        limit_bytes: what the budget still allows for new rows, all ranks together; None is unlimited.
        asked: rows are kept whether that pays or not, where they fit.
    """
    futures = [forecast(rank) for rank in ranks]
    kept, left = ([_ledger(future, kept=kept) for future in futures] for kept in (True, False))
    gained = _saved(futures, kept) - _saved(futures, left)
    obstacle = _obstacle(ranks, limit_bytes=limit_bytes)
    fits, pays = not obstacle, gained > 0
    if obstacle:
        reason = obstacle
    elif pays:
        reason = f"saves {gained:.1f} s from here on"
    elif not reads_again(ranks):
        reason = never_again(ranks)
    elif any(rank.epochs_until_move < rank.epochs_left for rank in ranks):
        reason = "the cut is likely to move before the rows are read often enough"
    else:
        reason = "reading and filling take longer than computing, in the epochs that are left"
    chosen = kept if asked or (fits and pays) else left
    whole, here = _saved(futures, chosen), _saved(futures, chosen, later=False)
    return Plan(
        use=fits and pays,
        fits=fits,
        seconds_saved=here,
        seconds_saved_later=whole - here,
        rows_read=sum(rank.batch_rows * f.steps * own.read for rank, f, own in zip(ranks, futures, chosen)),
        rows_read_later=sum(rank.batch_rows * f.steps * own.read_later for rank, f, own in zip(ranks, futures, chosen)),
        reason=reason,
        # Where no row is read again nothing was measured.
        rows=_table(ranks, saved=gained, reason=reason, limit_bytes=limit_bytes)
        if asked or reads_again(ranks)
        else (("decision", reason),),
    )


def reads_again(ranks: Sequence[Situation]) -> bool:
    """Tell whether any row that is kept at this cut would be read, whatever things cost."""
    futures = [forecast(replace(rank, sources=())).kept for rank in ranks if rank.rows]
    return any(future.read + future.read_later > 0 for future in futures)


def never_again(ranks: Sequence[Situation]) -> str:
    """Return the reason of a plan whose rows would never be read."""
    rank = max(ranks, key=lambda rank: rank.views)
    what = "no row" if rank.views == 1 else f"none of {rank.views} views"
    return f"{what} would come again in the {rank.epochs_left:.1f} epochs that are left"


def _ledger(future: Forecast, *, kept: bool) -> Ledger:
    return future.kept if kept else future.left


def _saved(futures: Sequence[Forecast], ledgers: Sequence[Ledger], *, later: bool = True) -> float:
    """Return the seconds that ranks save which wait for each other, until the cut moves or the run ends."""
    spent = [
        future.images - future.steps * (own.saved + (own.saved_later if later else 0.0))
        for future, own in zip(futures, ledgers, strict=True)
    ]
    return max(future.images for future in futures) - max(spent)


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
