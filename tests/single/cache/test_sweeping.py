"""Rows of a shallower cut spare a part of the forward whichever batches they were stored in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hvfreeze.cache.activations import PrefixActivations, Shares
from tests.single.cache.epochs import check_outputs
from tests.single.cache.material import BATCH_ROWS, FrozenNet, batches_of

NUM_SAMPLES = 4 * BATCH_ROWS
IDS = np.arange(NUM_SAMPLES)
OWNED_KEYS = (np.tile(IDS, 2), np.repeat(np.arange(2), NUM_SAMPLES))


def epoch(number: int) -> list[tuple[Any, Any]]:
    return batches_of(NUM_SAMPLES, epoch=number, views=2)


def half_filled(net: FrozenNet, directory: Path) -> PrefixActivations:
    """Rows of half of view 0 at cut 1, and all of view 1."""
    cached = net.cached(directory)
    net.begin(cached, 1, OWNED_KEYS)
    for batch in [*epoch(0)[2:], *epoch(1)]:
        cached.get(*batch)
    assert cached.counters.rows_written == 6 * BATCH_ROWS
    return cached


def check(cached: PrefixActivations, net: FrozenNet, number: int) -> list[tuple[int, int]]:
    """The epoch has the bits of computing everything; returns (start, stop) of the forwards, the sweep's first."""
    net.calls = []
    cached.announce(epoch(number))
    cached.sweep()
    outputs = [cached.get(*batch) for batch in epoch(number)]
    check_outputs(outputs, net, cached.cut, epoch(number))
    return [call[:2] for call in net.calls]


def test_rows_of_half_a_view_at_the_old_cut_spare_half_of_the_forwards_from_images(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = half_filled(net, tmp_path)
    views = [(IDS, np.full_like(IDS, view)) for view in range(2)]
    assert cached.shares(net.fingerprint(1), 1, views) == Shares((0.5, 1.0), 0, 0.0, 0)
    assert cached.shares(net.fingerprint(3), 3, views) == Shares((0.0, 0.0), 0, 0.75, 1)
    net.begin(cached, 3, OWNED_KEYS)
    assert check(cached, net, 2) == [(1, 3), (1, 3), (0, 3), (0, 3)]
    assert cached.counters.rows_advanced == {1: 2 * BATCH_ROWS}
    assert check(cached, net, 3) == [(1, 3)] * 4, "all of a view is there: nothing is gained by computing it ahead"
    assert check(cached, net, 4) == check(cached, net, 5) == []
    assert not cached.missing(*OWNED_KEYS).any()
    cached.close()


def test_a_cut_whose_rows_are_not_kept_starts_at_older_rows_and_completes_them(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = half_filled(net, tmp_path)
    cached.begin_cut(3, store=False)
    assert check(cached, net, 2) == [(0, 1), (0, 1), *[(1, 3)] * 4]
    assert check(cached, net, 3) == [(1, 3)] * 4
    assert check(cached, net, 4) == [(1, 3)] * 4
    net.begin(cached, 4, OWNED_KEYS)
    assert check(cached, net, 6) == [(1, 4)] * 4
    cached.close()


def test_the_cut_may_move_while_an_epoch_is_under_way(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = half_filled(net, tmp_path)
    cached.announce(epoch(2))
    cached.get(*epoch(2)[0])
    net.begin(cached, 2, OWNED_KEYS)
    net.calls = []
    cached.sweep()
    outputs = [cached.get(*batch) for batch in epoch(2)[1:]]
    check_outputs(outputs, net, 2, epoch(2)[1:])
    assert len(net.calls) == 3 and (1, 2, BATCH_ROWS) in net.calls
    cached.close()
