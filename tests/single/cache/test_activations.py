from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.compute import Activations, permuted_batch_is_exact
from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import Budget, LimitedDisk
from hvfreeze.cache.file.names import directory_bytes
from hvfreeze.cache.file.reader import ActivationFile
from hvfreeze.cache.file.rows import Keys
from hvfreeze.cache.store.index import RowIndex
from tests.single.cache.material import (
    BATCH_ROWS,
    FrozenNet,
    batches_of,
    make_keys,
    make_mark,
    open_store,
    same_bits,
    write_file,
)

Batches = Sequence[tuple[Keys, Keys]]

NUM_SAMPLES = 72  # four batches and a half
UNIVERSE = (np.arange(NUM_SAMPLES), np.zeros(NUM_SAMPLES, np.int64))
SLOW_DISK = LimitedDisk(read_rate=2e7, write_rate=2e8)


def run_epoch(activations: Activations, batches: Batches, *, sweep: bool = False) -> list[Tensor]:
    activations.announce(batches)
    if sweep:
        activations.sweep()
    return [activations.get(*batch) for batch in batches]


def check_epoch(activations: Activations, net: FrozenNet, batches: Batches, *, sweep: bool = False) -> None:
    """The epoch's batches have the bits and strides of an epoch without a cache."""
    reference = net.null()
    reference.begin_cut(activations.cut)
    outputs = run_epoch(activations, batches, sweep=sweep)
    expected = run_epoch(reference, batches)
    assert all(same_bits(left, right) for left, right in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("disk", [None, SLOW_DISK])
def test_activations_have_the_bits_of_recomputing_while_filling_and_reading(
    channels_last: bool, disk: LimitedDisk | None, tmp_path: Path
) -> None:
    net = FrozenNet(channels_last=channels_last)
    cached = net.cached(tmp_path, disk=disk)
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    for epoch in range(3):
        before = cached.counters.forwards
        check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=epoch))
        assert cached.counters.forwards - before == (5 if epoch == 0 else 0)
    assert cached.counters.rows_written == NUM_SAMPLES and cached.counters.rows_read == 2 * NUM_SAMPLES
    assert cached.complete and cached.exact and cached.stored_bytes == NUM_SAMPLES * 8 * 8 * 8 * 4
    cached.close()
    later = net.cached(tmp_path)
    later.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    check_epoch(later, net, batches_of(NUM_SAMPLES, epoch=7))
    assert later.counters.forwards == 0 and later.counters.rows_written == 0
    later.close()


def test_every_forward_has_the_training_batch_shape(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    cached.begin_cut(1, mark=net.mark(1), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    cached.begin_cut(3, mark=net.mark(3), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES, epoch=1)[2:])
    run_epoch(cached, batches_of(NUM_SAMPLES, epoch=2), sweep=True)
    assert len(net.calls) > 8 and {rows for _, _, rows in net.calls} == {BATCH_ROWS}
    cached.close()


def test_a_deeper_cut_is_computed_from_the_rows_of_the_old_one_whose_file_then_goes(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    cached.begin_cut(1, mark=net.mark(1), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    cached.begin_cut(3, mark=net.mark(3), universe=UNIVERSE)
    net.calls, net.loaded = [], 0
    outputs = run_epoch(cached, batches_of(NUM_SAMPLES, epoch=1))
    assert {(start, stop) for start, stop, _ in net.calls} == {(1, 3)} and net.loaded == 0
    reference = net.null()
    reference.begin_cut(3)
    expected = run_epoch(reference, batches_of(NUM_SAMPLES, epoch=1))
    assert all(same_bits(left, right) for left, right in zip(outputs, expected, strict=True))
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=2))
    cached.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cut_that_moves_again_in_the_middle_of_filling_loses_nothing(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    cached.begin_cut(1, mark=net.mark(1), universe=UNIVERSE)
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=1)[:2])
    cached.begin_cut(4, mark=net.mark(4), universe=UNIVERSE)
    net.loaded = 0
    outputs = run_epoch(cached, batches_of(NUM_SAMPLES, epoch=1)[:3])
    assert net.loaded == 0 and [call[:2] for call in net.calls[-3:]] == [(2, 4), (2, 4), (1, 4)]
    reference = net.null()
    reference.begin_cut(4)
    expected = run_epoch(reference, batches_of(NUM_SAMPLES, epoch=1)[:3])
    assert all(same_bits(left, right) for left, right in zip(outputs, expected, strict=True))
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=3), sweep=True)
    cached.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_thawing_drops_deeper_rows_and_goes_back_to_shallower_ones(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    cached.begin_cut(1, mark=net.mark(1), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    cached.begin_cut(3, mark=net.mark(3), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES)[:2])
    cached.begin_cut(1, mark=net.mark(1), universe=UNIVERSE)
    before = cached.counters.forwards
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=4))
    assert cached.counters.forwards == before
    with torch.no_grad():
        for parameter in net.blocks[1].parameters():
            parameter.mul_(1.5)
    cached.begin_cut(3, mark=net.mark(3), universe=UNIVERSE)
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=5))
    cached.begin_cut(0)
    images = cached.get(*batches_of(NUM_SAMPLES)[0])
    assert torch.equal(images, net.load(*batches_of(NUM_SAMPLES)[0]))
    cached.close()
    assert list(tmp_path.iterdir()) == []


def test_thawing_to_a_cut_that_was_never_cached_does_not_use_deeper_rows(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    cached.begin_cut(3, mark=net.mark(3), universe=UNIVERSE)
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    cached.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_old_rows_of_a_prefix_that_has_changed_are_not_used(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path, prefix_digest=net.digest)
    cached.begin_cut(1, mark=net.mark(1), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    net.blocks[0][0][1].running_mean += 0.5
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    cached.close()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_a_rounded_row_has_the_same_bits_whenever_and_from_whatever_it_was_computed(
    stored: torch.dtype, tmp_path: Path
) -> None:
    net, dtype = FrozenNet(), str(stored).removeprefix("torch.")
    moving, direct, unstored = (net.cached(tmp_path / name, stored=stored) for name in ("a", "b", "c"))
    moving.begin_cut(1, mark=net.mark(1, dtype=dtype), universe=UNIVERSE)
    first, again = (run_epoch(moving, batches_of(NUM_SAMPLES)) for _ in range(2))
    assert all(same_bits(left, right) for left, right in zip(first, again, strict=True))
    assert all(torch.equal(rows, rows.to(stored).float()) for rows in first)
    mark = net.mark(3, dtype=dtype, via=[1])
    moving.begin_cut(3, mark=mark, universe=UNIVERSE)
    direct.begin_cut(3, mark=mark, universe=UNIVERSE)
    unstored.begin_cut(3, mark=mark, universe=UNIVERSE, store=False)
    net.calls = []
    outputs = [run_epoch(one, batches_of(NUM_SAMPLES)) for one in (moving, direct, unstored, moving)]
    assert {call[:2] for call in net.calls} == {(0, 1), (1, 3)}
    for other in outputs[1:]:
        assert all(same_bits(left, right) for left, right in zip(outputs[0], other, strict=True))
    assert not moving.exact
    for one in (moving, direct, unstored):
        one.close()


def test_rows_rounded_at_another_cut_are_not_a_source(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path, stored=torch.float16)
    cached.begin_cut(1, mark=net.mark(1, dtype="float16"), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    cached.begin_cut(3, mark=net.mark(3, dtype="float16"), universe=UNIVERSE)
    net.calls = []
    run_epoch(cached, batches_of(NUM_SAMPLES)[:1])
    assert [call[:2] for call in net.calls] == [(0, 3)]
    cached.close()


def test_a_sweep_computes_only_missing_rows_and_pads_the_last_forward(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES, drop_last=True))
    assert cached.counters.rows_written == 64
    cached.announce(batches_of(NUM_SAMPLES, epoch=1, drop_last=True))
    before = cached.counters.forwards
    stored = cached.sweep()
    assert cached.counters.forwards - before == 1
    announced = np.concatenate([ids for ids, _ in batches_of(NUM_SAMPLES, epoch=1, drop_last=True)])
    first = np.concatenate([ids for ids, _ in batches_of(NUM_SAMPLES, drop_last=True)])
    assert stored == len(np.setdiff1d(announced, first)) < BATCH_ROWS
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=1, drop_last=True))
    assert cached.counters.forwards - before == 1
    assert cached.sweep(everything=True) == NUM_SAMPLES - 64 - stored
    assert cached.complete
    cached.close()


def test_an_epoch_of_which_nothing_is_cached_is_filled_while_training(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    views = np.repeat(np.arange(2), NUM_SAMPLES)
    cached.begin_cut(2, mark=net.mark(2, augment="views:2"), universe=(np.tile(UNIVERSE[0], 2), views))
    for epoch in range(4):
        cached.announce(batches_of(NUM_SAMPLES, epoch=epoch, views=2))
        assert cached.sweep() == 0
        check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=epoch, views=2))
    assert cached.counters.forwards == 10 and cached.complete
    cached.close()


def test_a_partly_filled_cache_is_used_by_the_next_run_for_what_it_holds(tmp_path: Path) -> None:
    net = FrozenNet()
    first = net.cached(tmp_path)
    first.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    run_epoch(first, batches_of(NUM_SAMPLES)[:3])
    first.close()
    second = net.cached(tmp_path)
    second.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    check_epoch(second, net, batches_of(NUM_SAMPLES))
    assert second.counters.forwards == 2 and second.counters.rows_read == 48
    second.close()
    third = net.cached(tmp_path)
    third.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    assert third.complete
    third.close()


def test_evaluation_batches_with_padding_of_their_own_count_each_sample_once(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    ids = np.arange(20)
    cached.begin_cut(2, mark=net.mark(2, split="test"), universe=(ids, np.zeros_like(ids)))
    padded = np.pad(ids, (0, 12), mode="edge")
    batches = [(padded[:16], np.zeros(16, np.int64)), (padded[16:], np.zeros(16, np.int64))]
    for _ in range(2):
        cached.announce(batches)
        for batch, counted in zip(batches, (16, 4), strict=True):
            cached.get(*batch, counted=counted)
    assert cached.counters.rows_written == cached.counters.rows_read == 20 and cached.counters.forwards == 2
    cached.close()


def test_a_run_of_another_size_needs_no_forward(tmp_path: Path) -> None:
    net = FrozenNet()
    for rank in range(2):
        one = net.cached(tmp_path, shard=f"{rank}of2")
        one.begin_cut(2, mark=net.mark(2), universe=(UNIVERSE[0][rank::2], UNIVERSE[1][rank::2]))
        one.sweep(everything=True)
        one.close()
    for rank in range(3):
        one = net.cached(tmp_path, shard=f"{rank}of3")
        ids = UNIVERSE[0][rank::3]
        one.begin_cut(2, mark=net.mark(2), universe=(ids, np.zeros_like(ids)))
        check_epoch(one, net, [(ids[:16], np.zeros(16, np.int64))])
        assert one.counters.forwards == 0
        one.close()


def test_ranks_that_share_read_what_the_other_has_published(tmp_path: Path) -> None:
    net = FrozenNet()
    ranks = [net.cached(tmp_path, shard=f"{rank}of2", shared=True) for rank in range(2)]
    batches = batches_of(64)
    for rank, one in enumerate(ranks):
        ids = np.concatenate([ids for ids, _ in batches[rank::2]])
        one.begin_cut(2, mark=net.mark(2), universe=(ids, np.zeros_like(ids)))
        run_epoch(one, batches[rank::2])
    for one in ranks:
        one.publish()
    for one in ranks:
        one.refresh()
        check_epoch(one, net, batches_of(64, epoch=3))
        assert one.counters.forwards == 2
        one.close()


def test_every_shared_file_is_hashed_once_by_all_ranks_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, size = FrozenNet(), 4
    for rank in range(size):
        one = net.cached(tmp_path, shard=f"{rank}of{size}", shared=True)
        one.begin_cut(2, mark=net.mark(2), universe=(UNIVERSE[0][rank::size], UNIVERSE[1][rank::size]))
        one.sweep(everything=True)
        one.close()
    hashed: list[str] = []
    compare = ActivationFile._compare
    monkeypatch.setattr(ActivationFile, "_compare", lambda self: hashed.append(self.path.name) or compare(self))
    ranks = [net.cached(tmp_path, shard=f"{rank}of{size}", shared=True) for rank in range(size)]
    for rank, one in enumerate(ranks):
        one.begin_cut(2, mark=net.mark(2), universe=(UNIVERSE[0][rank::size], UNIVERSE[1][rank::size]))
    verified = [one.verify_share(rank, size) for rank, one in enumerate(ranks)]
    assert [len(names) for names in verified] == [1] * size
    for one in ranks:
        one.accept({name: digest for names in verified for name, digest in names.items()})
        check_epoch(one, net, batches_of(NUM_SAMPLES))
    assert sorted(hashed) == sorted(path.name for path in tmp_path.glob("*.h5"))
    late = net.cached(tmp_path, shard="0of4", shared=True)
    late.begin_cut(2, mark=net.mark(2), universe=(UNIVERSE[0][::4], UNIVERSE[1][::4]))
    late.accept({name: "another file's digest" for names in verified for name in names})
    check_epoch(late, net, batches_of(NUM_SAMPLES))
    assert len(hashed) == 2 * size, "what nobody has verified is verified by whoever reads it"
    for one in [*ranks, late]:
        one.close()


def test_the_index_of_shared_files_grows_once_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(6):
        write_file(tmp_path, num_rows=5, first=5 * rank, shard=f"{rank}of6")
    grown: list[int] = []
    extend = RowIndex.extend
    monkeypatch.setattr(RowIndex, "extend", lambda self, more: grown.append(len(more)) or extend(self, more))
    store = open_store(tmp_path, make_keys(1), shared=True)
    assert grown == [6] and not store.missing(make_keys(30)).any()


def test_training_may_change_what_it_gets_in_place(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path, disk=SLOW_DISK)
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    for epoch in range(3):
        for output in run_epoch(cached, batches_of(NUM_SAMPLES, epoch=epoch)):
            output.fill_(float("nan"))
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=3))
    cached.close()


def test_batches_of_a_slow_disk_are_read_before_they_are_asked_for(tmp_path: Path) -> None:
    readers: list[str] = []

    class Watched(LimitedDisk):
        def read(self, num_bytes: int) -> None:
            readers.append(threading.current_thread().name)
            super().read(num_bytes)

    net = FrozenNet()
    cached = net.cached(tmp_path, disk=Watched(read_rate=1e7, write_rate=1e9))
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    readers.clear()
    run_epoch(cached, batches_of(NUM_SAMPLES, epoch=1))
    assert len(readers) == 5 and all(name.startswith("cache-reader") for name in readers[2:])
    cached.close()


def test_batches_in_another_order_than_announced_are_right(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path, disk=SLOW_DISK)
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    cached.announce(batches_of(NUM_SAMPLES, epoch=1))
    reference = net.null()
    reference.begin_cut(2)
    for batch in [*batches_of(NUM_SAMPLES, epoch=2), *batches_of(NUM_SAMPLES, epoch=1)]:
        assert same_bits(cached.get(*batch), reference.get(*batch))
    cached.close()


def test_only_batches_that_are_not_cached_need_images(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    batches = batches_of(NUM_SAMPLES)
    assert not cached.is_cached(*batches[0])
    cached.get(*batches[0])
    assert cached.is_cached(*batches[0]) and not cached.is_cached(*batches[1])
    cached.close()


def test_time_that_training_waits_is_told_to_the_clock(tmp_path: Path) -> None:
    phases: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        yield

    net = FrozenNet()
    cached = net.cached(tmp_path, phase=phase)
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    batch = batches_of(NUM_SAMPLES)[0]
    cached.get(*batch)
    cached.get(*batch)
    assert phases == ["cache_read", "cache_write", "cache_read"]
    assert cached.counters.read_seconds > 0 and cached.counters.write_seconds > 0
    cached.close()


def test_a_cache_that_is_cut_off_while_in_use_is_given_up_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    cached.publish()
    (path,) = tmp_path.glob("*.h5")
    os.truncate(path, 4096)
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=1))
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=2))
    assert cached.failed is not None and str(path) in cached.failed
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    cached.begin_cut(3, mark=net.mark(3), universe=UNIVERSE)
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    cached.close()
    assert [left.name for left in tmp_path.iterdir()] == [path.name]


def test_a_damaged_file_ends_a_run_that_is_to_stop(tmp_path: Path) -> None:
    net = FrozenNet()
    first = net.cached(tmp_path)
    first.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    run_epoch(first, batches_of(NUM_SAMPLES))
    first.close()
    (path,) = tmp_path.glob("*.h5")
    content = bytearray(path.read_bytes())
    content[-500] ^= 1
    path.write_bytes(content)
    second = net.cached(tmp_path, on_failure="stop")
    with pytest.raises(CacheFault, match=str(path)) as stopped:
        second.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    assert stopped.value.exit_code == 3
    second.close()


def fill_with_other_rows(net: FrozenNet, directory: Path, *, change: float, **changes: Any) -> Path:
    """Publish rows of a net whose weights were changed, under the fingerprint of `net`; give the weights back."""
    mark, weight = net.mark(2, **changes), net.blocks[0][0][0].weight
    original = weight.detach().clone()
    other = net.cached(directory)
    with torch.no_grad():
        weight.mul_(1 + change)
        other.begin_cut(2, mark=mark, universe=UNIVERSE)
        run_epoch(other, batches_of(NUM_SAMPLES))
        weight.copy_(original)
    other.close()
    (path,) = directory.glob("*.h5")
    return path


@pytest.mark.parametrize(
    ("change", "changes", "steady", "used"),
    [
        (1e-6, {}, True, False),
        (1e-6, {}, False, True),
        (1e-6, {"threads": 2}, True, True),
        (0.5, {}, False, False),
        (0.5, {"threads": 2}, True, False),
    ],
)
def test_rows_are_compared_with_computed_ones_before_the_first_is_used(
    change: float, changes: dict[str, Any], steady: bool, used: bool, tmp_path: Path
) -> None:
    net = FrozenNet()
    path = fill_with_other_rows(net, tmp_path, change=change, **changes)
    stopping = net.cached(tmp_path, on_failure="stop")
    begin = partial(stopping.begin_cut, 2, mark=net.mark(2), universe=UNIVERSE, steady=steady)
    if used:
        begin()
        assert stopping.complete
    else:
        with pytest.raises(CacheFault, match=rf"{path} refused: its rows are not what this run computes"):
            begin()
    stopping.close()
    going_on = net.cached(tmp_path)
    going_on.begin_cut(2, mark=net.mark(2), universe=UNIVERSE, steady=steady)
    if not used:
        assert str(path) in (going_on.failed or "")
        check_epoch(going_on, net, batches_of(NUM_SAMPLES))
    assert (going_on.counters.rows_read == 0) or used
    going_on.close()
    assert path.exists(), "another run's file is left to its owner"


def test_every_file_that_comes_into_use_is_compared(tmp_path: Path) -> None:
    net = FrozenNet()
    for rank in range(3):
        one = net.cached(tmp_path, shard=f"{rank}of3")
        with torch.no_grad():
            net.blocks[0][0][0].weight.mul_(2.0 if rank == 2 else 1.0)
        one.begin_cut(2, mark=make_mark(), universe=(UNIVERSE[0][rank::3], UNIVERSE[1][rank::3]))
        one.sweep(everything=True)
        with torch.no_grad():
            net.blocks[0][0][0].weight.div_(2.0 if rank == 2 else 1.0)
        one.close()
    whole = net.cached(tmp_path)
    whole.begin_cut(2, mark=make_mark(), universe=UNIVERSE)
    assert "2of3" in (whole.failed or ""), whole.failed


@pytest.mark.parametrize("on_failure", ["recompute", "stop"])
def test_a_full_disk_means_what_was_asked_for(on_failure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = FrozenNet()
    budget = Budget()
    cached = net.cached(tmp_path, on_failure=on_failure, budget=budget)
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    if on_failure == "stop":
        with pytest.raises(CacheFault, match="No space left"):
            run_epoch(cached, batches_of(NUM_SAMPLES))
    else:
        check_epoch(cached, net, batches_of(NUM_SAMPLES))
        assert cached.failed is not None and "No space left" in cached.failed
    cached.close()
    assert list(tmp_path.iterdir()) == [] and budget.used_bytes == 0


def test_another_rank_can_have_the_cache_given_up(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    run_epoch(cached, batches_of(NUM_SAMPLES)[:2])
    cached.disable("rank 1: the disk is full")
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    assert cached.failed == "rank 1: the disk is full" and list(tmp_path.iterdir()) == []
    cached.close()


def test_an_old_file_makes_room_when_both_do_not_fit_the_budget(tmp_path: Path) -> None:
    net = FrozenNet()
    size = NUM_SAMPLES * 8 * 8 * 8 * 4
    budget = Budget(size * 3 // 2)
    cached = net.cached(tmp_path, budget=budget)
    for cut in (1, 2, 3):
        cached.begin_cut(cut, mark=net.mark(cut), universe=UNIVERSE)
        check_epoch(cached, net, batches_of(NUM_SAMPLES))
        assert cached.complete
        assert directory_bytes(tmp_path) <= budget.used_bytes <= size * 3 // 2
    assert cached.failed is None
    cached.close()


@pytest.mark.parametrize("sweep", [False, True])
def test_rows_that_another_job_is_building_are_computed_and_read_from_the_next_epoch_on(
    sweep: bool, tmp_path: Path
) -> None:
    net = FrozenNet()
    builder, other = net.cached(tmp_path, owner="builder"), net.cached(tmp_path, owner="other", on_failure="stop")
    for cached in (builder, other):
        cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    first, *rest = batches_of(NUM_SAMPLES)
    builder.get(*first)
    if sweep:
        assert other.sweep(everything=True) == 0 and other.counters.forwards == 1
    check_epoch(other, net, batches_of(NUM_SAMPLES), sweep=sweep)
    assert other.counters.rows_written == 0
    run_epoch(builder, rest)
    builder.publish()
    forwards = other.counters.forwards
    check_epoch(other, net, batches_of(NUM_SAMPLES, epoch=1), sweep=sweep)
    assert other.counters.forwards == forwards and other.counters.rows_read == NUM_SAMPLES
    other.close()
    builder.close()


def test_a_file_of_an_earlier_run_is_a_hit_and_outlives_the_cut(tmp_path: Path) -> None:
    net = FrozenNet()
    earlier = net.cached(tmp_path, owner="earlier")
    earlier.begin_cut(1, mark=net.mark(1), universe=UNIVERSE)
    earlier.sweep(everything=True)
    earlier.close()
    later = net.cached(tmp_path, owner="later")
    later.begin_cut(1, mark=net.mark(1), universe=UNIVERSE)
    assert later.complete
    later.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    check_epoch(later, net, batches_of(NUM_SAMPLES))
    later.close()
    assert len(list(tmp_path.glob("*.h5"))) == 2


def test_a_batch_larger_than_the_training_batch_is_a_mistake(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    cached.begin_cut(2, mark=net.mark(2), universe=UNIVERSE)
    with pytest.raises(ValueError, match="17 rows"):
        cached.get(np.arange(17), np.zeros(17, np.int64))
    cached.close()


def test_the_probe_of_a_permuted_batch_tells_whether_rows_keep_their_bits() -> None:
    net = FrozenNet()
    images = net.load(*batches_of(NUM_SAMPLES)[0])
    assert permuted_batch_is_exact(lambda x: net.run(x, 0, 3), images)
    norm = nn.BatchNorm2d(3).train()
    position = torch.arange(BATCH_ROWS).view(-1, 1, 1, 1)
    assert not permuted_batch_is_exact(lambda x: norm(x + position), images)
    assert not permuted_batch_is_exact(lambda x: x + position * 1e-7, images)


def test_all_files_and_threads_are_let_go(tmp_path: Path) -> None:
    net = FrozenNet()
    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        cached: PrefixActivations | None = net.cached(tmp_path, disk=SLOW_DISK)
        assert cached is not None
        for cut in (1, 2):
            cached.begin_cut(cut, mark=net.mark(cut), universe=UNIVERSE)
            run_epoch(cached, batches_of(NUM_SAMPLES)[:3])
        cached.close()
        cached = None
    assert (set(threading.enumerate()), len(os.listdir("/proc/self/fd"))) == before
