"""What a forecast says will be read is what the cache then reads, wherever in an epoch a stay begins and ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.planning import CostMeasurement, Rates, forecast
from tests.single.cache.material import BATCH_ROWS, FrozenNet, batches_of

STEPS = 4
NUM_SAMPLES = STEPS * BATCH_ROWS
IDS = np.arange(NUM_SAMPLES)
FREE = Rates(
    read_cold=0.0, read_warm=0.0, read_cpu=0.0, write=0.0, write_cpu=0.0, hash=0.0, free_bytes=1, filesystem=""
)
USUAL = CostMeasurement(
    image_seconds=0.25,
    prefix_seconds=0.75,
    suffix_seconds=0.0,
    batch_rows=BATCH_ROWS,
    rows=NUM_SAMPLES,
    views=1,
    row_bytes=1,
    epochs_left=1.0,
    memory_bytes=1 << 30,
    rates=FREE,
)


def situation(*, views: int, begin: int, move: int, end: int, **changes: Any) -> CostMeasurement:
    """A stay from step `begin` to step `move` of a run of `end` steps."""
    return replace(
        USUAL,
        views=views,
        epochs_left=(end - begin) / STEPS,
        epochs_until_move=(move - begin) / STEPS,
        passed=begin / STEPS % 1,
        **changes,
    )


def lived_through(
    directory: Path, *, views: int, begin: int, move: int, end: int, store: bool = True
) -> tuple[list[int], CostMeasurement | None]:
    """Return the batches of rows read at cut 1 while it stays, from it after the cut has moved to 3, and at cut 3.

    The forecast is that of the second stay, made when the cut moves.
    """
    net, said = FrozenNet(), None
    owned_keys = (np.tile(IDS, views), np.repeat(np.arange(views), NUM_SAMPLES))
    cached, cuts = net.cached(directory), {begin: 1, move: 3}
    before = 0
    for first in range(begin // STEPS * STEPS, end, STEPS):
        epoch = batches_of(NUM_SAMPLES, epoch=first // STEPS, views=views)
        coming = [(step, batch) for step, batch in enumerate(epoch, first) if begin <= step < end]
        if first not in cuts:
            cached.announce([batch for _, batch in coming])
            cached.sweep()
        for step, batch in coming:
            if step == move:
                said = second_stay(cached, net, views=views, move=move, end=end)
                before = cached.counters.rows_read
            if step in cuts:
                kept = store or step == begin
                cached.begin_cut(cuts[step], fingerprint=net.fingerprint(cuts[step]), owned_keys=owned_keys, store=kept)
                cached.announce([batch for later, batch in coming if later >= step])
                cached.sweep()
            cached.get(*batch)
    rows, advanced = cached.counters.rows_read, cached.counters.rows_advanced.get(1, 0)
    cached.close()
    found = [before, advanced, rows - before] if said else [rows, 0, 0]
    assert all(count % BATCH_ROWS == 0 for count in found)
    return [count // BATCH_ROWS for count in found], said


def second_stay(cached: PrefixActivations, net: FrozenNet, *, views: int, move: int, end: int) -> CostMeasurement:
    """What is known when the cut moves to 3."""
    epochs = [(IDS, np.full_like(IDS, (move // STEPS + later) % views)) for later in range(views)]
    shares = cached.shares(net.fingerprint(3), 3, epochs)
    return situation(views=views, begin=move, move=99, end=end, present=shares.present, sources=shares.sources)


STAYS = {
    "a cut that stays": {"views": 1, "begin": 0, "move": 99, "end": 16},
    "from the middle of an epoch": {"views": 1, "begin": 2, "move": 99, "end": 12},
    "two views from the middle of an epoch": {"views": 2, "begin": 6, "move": 99, "end": 24},
    "a move at an epoch's end": {"views": 1, "begin": 0, "move": 8, "end": 16},
    "a move in the middle of the first epoch": {"views": 1, "begin": 0, "move": 2, "end": 12},
    "a move in the middle of the second": {"views": 1, "begin": 0, "move": 6, "end": 12},
    "two views, of which one is half there at the move": {"views": 2, "begin": 0, "move": 6, "end": 20},
    "three views, of which one comes again": {"views": 3, "begin": 2, "move": 8, "end": 18},
    "four views in a run that ends before any comes again": {"views": 4, "begin": 2, "move": 10, "end": 16},
    "four views from the middle, too late to come again whole": {"views": 4, "begin": 22, "move": 32, "end": 40},
}


@pytest.mark.parametrize("name", STAYS)
def test_as_many_rows_are_read_as_was_said(name: str, tmp_path: Path) -> None:
    stay = STAYS[name]
    said = forecast(situation(**stay), kept=True)
    (here, later, deeper), again = lived_through(tmp_path / "kept", **stay)
    assert (STEPS * said.read, STEPS * said.read_later) == pytest.approx((here, later)), said
    if again is not None:
        assert STEPS * forecast(again, kept=True).read == pytest.approx(later + deeper)
        (_, later, deeper), _ = lived_through(tmp_path / "left", **stay, store=False)
        assert deeper == 0 and STEPS * forecast(again, kept=False).read == pytest.approx(later)


def test_a_batch_that_is_read_saves_what_computing_takes_and_storing_costs() -> None:
    rates = replace(FREE, write=2.0, write_cpu=2.0, read_warm=0.5, read_cpu=0.5)
    one = situation(views=2, begin=0, move=99, end=12, row_bytes=1, rates=rates)
    written, read = 2 * BATCH_ROWS, 0.5 * BATCH_ROWS
    assert forecast(one, kept=True).saved == pytest.approx(2 * -written + 1 * (1.0 - read))


def test_what_starts_at_a_shallower_cut_is_spared_once_where_rows_are_kept_and_always_where_not() -> None:
    one = situation(views=1, begin=0, move=99, end=12, sources=(1.0,), source_spares=0.4)
    left, kept = forecast(one, kept=False), forecast(one, kept=True)
    assert left.saved == pytest.approx(3 * 0.4) and left.read == pytest.approx(3.0)
    assert kept.saved == pytest.approx(0.4 + 2 * 1.0) and kept.read == pytest.approx(3.0)


def test_half_of_a_view_at_a_shallower_cut_spares_half() -> None:
    one = situation(views=1, begin=0, move=99, end=8, sources=(0.5,), source_spares=0.4)
    assert forecast(one, kept=True).saved == pytest.approx(0.2 + 1.0)
    # The other half is computed up to that cut in the first epoch, and lies there in the second.
    left = forecast(one, kept=False)
    assert left.saved == pytest.approx(0.2 + 0.4) and left.read == pytest.approx(2.0)


def test_rows_computed_beforehand_are_read_in_every_epoch() -> None:
    one = situation(views=2, begin=0, move=99, end=12, all_at_once=True, present=(0.5, 0.0))
    assert forecast(one, kept=True).saved == pytest.approx(-1.5 + 3.0) and forecast(
        one, kept=True
    ).read == pytest.approx(3.0)


def test_the_last_view_of_an_earlier_run_is_read_when_its_epoch_comes() -> None:
    one = situation(views=2, begin=0, move=99, end=6, present=(0.0, 1.0))
    assert forecast(one, kept=True).read == pytest.approx(0.5) and forecast(one, kept=True).saved == pytest.approx(0.5)
