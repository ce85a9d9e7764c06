"""What training asks of the cache, batch by batch: the bits of recomputing, read, filled or swept."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hvfreeze.cache.activations import PrefixActivations, permuted_batch_is_exact
from hvfreeze.cache.file.reader import MappedRows
from tests.single.cache.epochs import NUM_SAMPLES, OWNED_KEYS, begun, check_epoch, check_outputs, run_epoch
from tests.single.cache.material import BATCH_ROWS, FrozenNet, batches_of, slow_down


@pytest.mark.parametrize(("channels_last", "slow"), [(True, False), (False, True)])
def test_activations_have_the_bits_of_recomputing_while_filling_and_reading(
    channels_last: bool, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slow:
        slow_down(monkeypatch, read_rate=2e7, write_rate=2e8)
    net = FrozenNet(channels_last=channels_last)
    cached = begun(net, tmp_path)
    for epoch in range(3):
        before = cached.counters.forwards
        check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=epoch))
        assert cached.counters.forwards - before == (5 if epoch == 0 else 0)
    assert cached.counters.rows_written == NUM_SAMPLES and cached.counters.rows_read == 2 * NUM_SAMPLES
    assert not cached.missing(*OWNED_KEYS).any() and cached.exact
    assert cached.stored_bytes == NUM_SAMPLES * 8 * 8 * 8 * 4
    cached.close()
    later = begun(net, tmp_path)
    check_epoch(later, net, batches_of(NUM_SAMPLES, epoch=7))
    assert later.counters.forwards == 0 and later.counters.rows_written == 0
    later.close()


def test_every_forward_has_the_training_batch_shape(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = begun(net, tmp_path, 1)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    net.begin(cached, 3, OWNED_KEYS)
    run_epoch(cached, batches_of(NUM_SAMPLES, epoch=1)[2:])
    run_epoch(cached, batches_of(NUM_SAMPLES, epoch=2), sweep=True)
    assert len(net.calls) > 8 and {rows for _, _, rows in net.calls} == {BATCH_ROWS}
    cached.close()


def test_a_sweep_computes_only_missing_rows_and_pads_the_last_forward(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = begun(net, tmp_path)
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
    assert not cached.missing(*OWNED_KEYS).any()
    cached.close()


def test_evaluation_batches_with_padding_of_their_own_count_each_sample_once(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = net.cached(tmp_path)
    ids = np.arange(20)
    net.begin(cached, 2, (ids, np.zeros_like(ids)), split="test")
    padded = np.pad(ids, (0, 12), mode="edge")
    batches = [(padded[:16], np.zeros(16, np.int64)), (padded[16:], np.zeros(16, np.int64))]
    for _ in range(2):
        cached.announce(batches)
        for batch, counted in zip(batches, (16, 4), strict=True):
            cached.get(*batch, counted=counted)
    assert cached.counters.rows_written == cached.counters.rows_read == 20 and cached.counters.forwards == 2
    cached.close()


def test_training_may_change_what_it_gets_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, read_rate=2e7, write_rate=2e8)
    net = FrozenNet()
    cached = begun(net, tmp_path)
    for epoch in range(3):
        for output in run_epoch(cached, batches_of(NUM_SAMPLES, epoch=epoch)):
            output.fill_(float("nan"))
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=3))
    cached.close()


def test_batches_of_a_slow_disk_are_read_before_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    slow_down(monkeypatch, read_rate=1e7)
    read = MappedRows.read

    def watched(self: MappedRows, rows: torch.Tensor) -> torch.Tensor:
        readers.append(threading.current_thread().name)
        return read(self, rows)

    monkeypatch.setattr(MappedRows, "read", watched)
    net = FrozenNet()
    cached = begun(net, tmp_path)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    readers.clear()
    run_epoch(cached, batches_of(NUM_SAMPLES, epoch=1))
    assert len(readers) == 5 and all(name.startswith("cache-reader") for name in readers[2:])
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
        cached: PrefixActivations | None = net.cached(tmp_path)
        assert cached is not None
        for cut in (1, 2):
            net.begin(cached, cut, OWNED_KEYS)
            run_epoch(cached, batches_of(NUM_SAMPLES)[:3])
        cached.close()
        cached = None
    assert (set(threading.enumerate()), len(os.listdir("/proc/self/fd"))) == before


def test_batches_in_another_order_than_announced_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, read_rate=2e7, write_rate=2e8)
    net = FrozenNet()
    cached = begun(net, tmp_path)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    cached.announce(batches_of(NUM_SAMPLES, epoch=1))
    batches = [*batches_of(NUM_SAMPLES, epoch=2), *batches_of(NUM_SAMPLES, epoch=1)]
    check_outputs([cached.get(*batch) for batch in batches], net, 2, batches)
    cached.close()
