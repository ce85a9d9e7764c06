"""Rows of a shallower cut spare a part of the forward whichever batches they were stored in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvfreeze.cache.activations import PrefixActivations
from tests.single.cache.epochs import check_outputs
from tests.single.cache.material import BATCH_ROWS, FrozenNet, batches_of, same_bits

NUM_SAMPLES = 4 * BATCH_ROWS
IDS = np.arange(NUM_SAMPLES)
OWNED_KEYS = (np.tile(IDS, 2), np.repeat(np.arange(2), NUM_SAMPLES))


def epoch(number: int) -> list[tuple[Any, Any]]:
    return batches_of(NUM_SAMPLES, epoch=number, views=2)


def half_filled(net: FrozenNet, directory: Path, **changes: Any) -> PrefixActivations:
    """Rows of half of view 0 at cut 1, and all of view 1."""
    cached = net.cached(directory, **changes)
    cached.begin_cut(
        1, fingerprint=net.fingerprint(1, dtype=str(changes.get("stored", "native"))), owned_keys=OWNED_KEYS
    )
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
    cached.begin_cut(3, fingerprint=net.fingerprint(3), owned_keys=OWNED_KEYS)
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
    cached.begin_cut(4, fingerprint=net.fingerprint(4), owned_keys=OWNED_KEYS)
    assert check(cached, net, 6) == [(1, 4)] * 4
    cached.close()


def test_rows_without_a_file_to_go_to_are_not_computed_ahead(tmp_path: Path) -> None:
    net = FrozenNet()
    half_filled(net, tmp_path).close()
    cached = net.cached(tmp_path)
    cached.begin_cut(1, fingerprint=net.fingerprint(1), owned_keys=OWNED_KEYS)
    cached.begin_cut(3, store=False)
    assert check(cached, net, 2) == [(0, 3)] * 4
    cached.close()


def test_the_cut_may_move_while_an_epoch_is_under_way(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = half_filled(net, tmp_path)
    cached.announce(epoch(2))
    cached.get(*epoch(2)[0])
    cached.begin_cut(2, fingerprint=net.fingerprint(2), owned_keys=OWNED_KEYS)
    net.calls = []
    cached.sweep()
    outputs = [cached.get(*batch) for batch in epoch(2)[1:]]
    check_outputs(outputs, net, 2, epoch(2)[1:])
    assert len(net.calls) == 3 and (1, 2, BATCH_ROWS) in net.calls
    cached.close()


@pytest.mark.parametrize("store", [True, False])
def test_rounded_rows_have_the_same_bits_whatever_they_were_computed_from(store: bool, tmp_path: Path) -> None:
    net = FrozenNet()
    cached = half_filled(net, tmp_path / "moving", stored=torch.float16)
    direct = net.cached(tmp_path / "direct", stored=torch.float16)
    fingerprint = net.fingerprint(3, dtype="torch.float16", via=[1])
    cached.begin_cut(3, fingerprint=fingerprint, owned_keys=OWNED_KEYS, store=store)
    direct.begin_cut(3, fingerprint=fingerprint, owned_keys=OWNED_KEYS, store=False)
    for one in (cached, direct):
        one.announce(epoch(2))
        one.sweep()
    assert cached.counters.rows_written == (10 if store else 8) * BATCH_ROWS
    for batch in epoch(2):
        assert same_bits(cached.get(*batch), direct.get(*batch))
    cached.close()
    direct.close()
