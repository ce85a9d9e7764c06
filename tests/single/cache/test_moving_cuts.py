"""What becomes of rows when the cut moves: sources for deeper ones, dropped when it thaws or the prefix changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hvfreeze.errors import UsageError
from tests.single.cache.epochs import NUM_SAMPLES, OWNED_KEYS, begun, check_epoch, check_outputs, run_epoch
from tests.single.cache.material import FrozenNet, batches_of, same_bits


def test_a_deeper_cut_is_computed_from_the_rows_of_the_old_one_whose_file_then_goes(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = begun(net, tmp_path, 1)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    net.begin(cached, 3, OWNED_KEYS)
    net.calls, net.loaded = [], 0
    outputs = run_epoch(cached, batches_of(NUM_SAMPLES, epoch=1))
    assert {(start, stop) for start, stop, _ in net.calls} == {(1, 3)} and net.loaded == 0
    check_outputs(outputs, net, 3, batches_of(NUM_SAMPLES, epoch=1))
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=2))
    cached.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cut_that_moves_again_in_the_middle_of_filling_loses_nothing(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = begun(net, tmp_path, 1)
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    net.begin(cached, 2, OWNED_KEYS)
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=1)[:2])
    net.begin(cached, 4, OWNED_KEYS)
    net.loaded = 0
    outputs = run_epoch(cached, batches_of(NUM_SAMPLES, epoch=1)[:3])
    assert net.loaded == 0 and [call[:2] for call in net.calls[-3:]] == [(2, 4), (2, 4), (1, 4)]
    check_outputs(outputs, net, 4, batches_of(NUM_SAMPLES, epoch=1)[:3])
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=3), sweep=True)
    cached.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_thawing_drops_deeper_rows_and_goes_back_to_shallower_ones(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = begun(net, tmp_path, 1)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    net.begin(cached, 3, OWNED_KEYS)
    run_epoch(cached, batches_of(NUM_SAMPLES)[:2])
    net.begin(cached, 1, OWNED_KEYS)
    before = cached.counters.forwards
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=4))
    assert cached.counters.forwards == before
    with torch.no_grad():
        for parameter in net.blocks[1].parameters():
            parameter.mul_(1.5)
    net.begin(cached, 3, OWNED_KEYS)
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=5))
    cached.begin_cut(0)
    images = cached.get(*batches_of(NUM_SAMPLES)[0])
    assert torch.equal(images, net.load(*batches_of(NUM_SAMPLES)[0]))
    cached.close()
    assert list(tmp_path.iterdir()) == []


def test_old_rows_of_a_prefix_that_has_changed_are_not_used(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = begun(net, tmp_path, 1, prefix_digest=net.digest)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    net.blocks[0][0][1].running_mean += 0.5
    net.begin(cached, 2, OWNED_KEYS)
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    cached.close()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_a_rounded_row_has_the_same_bits_whenever_and_from_whatever_it_was_computed(
    stored: torch.dtype, tmp_path: Path
) -> None:
    net, dtype = FrozenNet(), str(stored).removeprefix("torch.")
    moving, direct, unstored = (net.cached(tmp_path / name, stored=stored) for name in ("a", "b", "c"))
    net.begin(moving, 1, OWNED_KEYS, dtype=dtype)
    first, again = (run_epoch(moving, batches_of(NUM_SAMPLES)) for _ in range(2))
    assert all(same_bits(left, right) for left, right in zip(first, again, strict=True))
    assert all(torch.equal(rows, rows.to(stored).float()) for rows in first)
    net.begin(moving, 3, OWNED_KEYS, dtype=dtype, via=[1])
    net.begin(direct, 3, OWNED_KEYS, dtype=dtype, via=[1])
    net.begin(unstored, 3, OWNED_KEYS, store=False, dtype=dtype, via=[1])
    net.calls = []
    outputs = [run_epoch(one, batches_of(NUM_SAMPLES)) for one in (moving, direct, unstored, moving)]
    assert {call[:2] for call in net.calls} == {(0, 1), (1, 3)}
    for other in outputs[1:]:
        assert all(same_bits(left, right) for left, right in zip(outputs[0], other, strict=True))
    assert not moving.exact
    for one in (moving, direct, unstored):
        one.close()


def test_activations_that_a_narrow_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    net = FrozenNet()
    net.pixels *= 1e6
    narrow, wide = (net.cached(tmp_path / str(stored), stored=stored) for stored in (torch.float16, torch.bfloat16))
    net.begin(wide, 1, OWNED_KEYS, dtype="bfloat16")
    run_epoch(wide, batches_of(NUM_SAMPLES))
    net.begin(narrow, 1, OWNED_KEYS, dtype="float16")
    with pytest.raises(
        UsageError, match=r"float16 holds values up to 65504, but block 1 computes larger.*use bfloat16"
    ):
        run_epoch(narrow, batches_of(NUM_SAMPLES))
    for one in (narrow, wide):
        one.close()


def test_rows_rounded_at_another_cut_are_not_a_source(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path, stored=torch.float16)
    net.begin(cached, 1, OWNED_KEYS, dtype="float16")
    run_epoch(cached, batches_of(NUM_SAMPLES))
    net.begin(cached, 3, OWNED_KEYS, dtype="float16")
    net.calls = []
    run_epoch(cached, batches_of(NUM_SAMPLES)[:1])
    assert [call[:2] for call in net.calls] == [(0, 3)]
    cached.close()


@pytest.mark.parametrize(("reads", "given_up"), [(True, True), (True, False), (False, False)])
def test_a_run_that_has_read_inexact_rows_stays_inexact_when_they_are_gone(
    tmp_path: Path, reads: bool, given_up: bool
) -> None:
    net = FrozenNet()
    other = net.cached(tmp_path, owner="other")
    net.begin(other, 1, OWNED_KEYS, threads=2)
    run_epoch(other, batches_of(NUM_SAMPLES))
    other.close()
    cached = net.cached(tmp_path)
    assert cached.exact
    net.begin(cached, 1, OWNED_KEYS)
    assert not cached.exact
    if reads:
        run_epoch(cached, batches_of(NUM_SAMPLES)[:1])
    if given_up:
        cached.disable("the disk is full")
    else:
        cached.begin_cut(0)
    assert cached.exact is not reads
    cached.close()


def test_thawing_to_a_cut_that_was_never_cached_does_not_use_deeper_rows(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = begun(net, tmp_path, 3)
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    net.begin(cached, 2, OWNED_KEYS)
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    cached.close()
    assert len(list(tmp_path.iterdir())) == 1
