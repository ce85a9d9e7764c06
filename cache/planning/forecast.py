"""What keeping the rows of a cut will save a rank, epoch by epoch as its views come again; a pure function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hvfreeze.cache.planning.situation import Situation

ROUNDING = 1e-9


@dataclass
class Ledger:
    """Seconds saved against computing every batch from images, and epochs' worth of batches that begin with rows read.

    `_later` is what comes after the cut's next move, when rows of this one are where deeper ones are computed from.
    """

    saved: float = 0.0
    saved_later: float = 0.0
    read: float = 0.0
    read_later: float = 0.0

    def count(self, share: float, *, gain: float, read: float) -> None:
        """Add a share of an epoch at this cut, of which a batch gains so many seconds and reads so many batches."""
        self.saved += share * gain
        self.read += share * read

    def count_later(self, share: float, *, gain: float, read: float) -> None:
        """Add the same after the move."""
        self.saved_later += share * gain
        self.read_later += share * read


@dataclass(frozen=True)
class Forecast:
    """One rank's future from here on.

    Attributes:
        steps: batches of an epoch; what the ledgers count is to be multiplied by it.
        images: seconds that computing every batch from images takes.
        kept: where the rows of this cut are kept.
        left: where they are not, and those of a shallower cut still serve.
    """

    steps: int
    images: float
    kept: Ledger
    left: Ledger


class Stretch(NamedTuple):
    """A part of an epoch, as shares of it."""

    slot: int
    """Which of the next `views` epochs shows the same views."""
    passed: float
    """That is over."""
    here: float
    """That is before the cut's move."""
    after: float
    """That is after it."""

    def ahead(self, share: float) -> float:
        """Return the part of the rows still to come that is there, where `share` of the whole epoch's rows is.

        Rows of what is over have been stored in passing, and are not met again in this epoch.
        """
        return max(0.0, share - self.passed) / (1.0 - self.passed)


def forecast(rank: Situation) -> Forecast:
    """Return what a rank saves with and without the rows of this cut."""
    steps = rank.rows // max(1, rank.batch_rows)
    verified = rank.rows_present * rank.row_bytes * rank.rates.hash
    kept = _kept(rank, steps=steps)
    kept.saved -= verified / max(1, steps)
    return Forecast(steps, steps * rank.epochs_left * rank.compute_seconds, kept, _left(rank, steps=steps))


def _stretches(rank: Situation) -> Iterator[Stretch]:
    """Yield the epochs from now on, the first of which may have begun and the last may end early."""
    at, number, passed = 0.0, 0, rank.passed
    while at < rank.epochs_left - ROUNDING:
        length = min(1.0 - passed, rank.epochs_left - at)
        here = min(max(rank.epochs_until_move - at, 0.0), length)
        yield Stretch(number % rank.views, passed, here, length - here)
        at, number, passed = at + length, number + 1, 0.0


def _kept(rank: Situation, *, steps: int) -> Ledger:
    """Return what comes of filling the cache in the first epochs of each view, and reading it from then on."""
    ledger, there, sources = Ledger(), _by_view(rank.present, rank.views), _by_view(rank.sources, rank.views)
    unread = [1.0] * rank.views
    reading = rank.compute_seconds - rank.read_seconds
    if rank.all_at_once:
        ledger.saved -= sum(1.0 - share for share in there) * (rank.compute_seconds + rank.write_seconds)
        there = [1.0] * rank.views
    for stretch in _stretches(rank):
        slot, _, here, after = stretch
        share, source = stretch.ahead(there[slot]), stretch.ahead(sources[slot])
        swept = _mixed(share, steps) or (share <= ROUNDING and _mixed(source, steps))
        # What this cut has of an epoch was computed in a part of it that the shallower one did not see.
        missing = 1.0 - share
        source = min(1.0, source / missing) if missing > ROUNDING else 0.0
        filling = source * rank.source_spares - rank.write_seconds
        if here > ROUNDING:
            if swept:
                # The missing rows are put together, computed and then read with the others.
                cost = missing * (rank.compute_seconds - filling)
                ledger.count(here, gain=reading - cost, read=1.0 + missing * source)
            elif share > 1.0 - ROUNDING:
                ledger.count(here, gain=reading, read=1.0)
            else:
                ledger.count(here, gain=filling, read=source)
            there[slot] += missing * here
            # What an epoch has added is not met again in that epoch.
            share = 1.0 if swept else share
        # A deeper row is computed from these once; then it is there itself, or the plan of that cut counts it.
        again = min(after, unread[slot]) if share > ROUNDING else 0.0
        unread[slot] -= again
        ledger.count_later(again, gain=share * reading, read=share)
    return ledger


def _left(rank: Situation, *, steps: int) -> Ledger:
    """Return what comes of beginning with the rows of a shallower cut."""
    ledger, sources = Ledger(), _by_view(rank.sources, rank.views)
    unread = [1.0] * rank.views
    for stretch in _stretches(rank):
        slot, _, here, after = stretch
        source = stretch.ahead(sources[slot])
        again = min(after, unread[slot])
        unread[slot] -= again
        gain = source * rank.source_spares
        # Where some are missing they are computed up to that cut, and then all are read there.
        read = 1.0 if _mixed(source, steps) else source
        ledger.count(here, gain=gain, read=read)
        ledger.count_later(again, gain=gain, read=read)
        sources[slot] += (read - source) * here
    return ledger


def _mixed(share: float, steps: int) -> bool:
    """Tell whether there are rows enough for a batch, and others that are missing."""
    return share * steps >= 1.0 and share <= 1.0 - ROUNDING


def _by_view(shares: tuple[float, ...], views: int) -> list[float]:
    return list(shares) if shares else [0.0] * views
