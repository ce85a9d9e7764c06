"""The account of what the cache saves, and what is known before it is planned."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hvfreeze.cache.activations import Counters
from hvfreeze.cache.faults import CacheFault
from hvfreeze.prefix import cache_decision
from hvfreeze.prefix.cache_decision import Account, CostInputs, Horizon, PrefixTimer, rates_of, space_in


def test_what_is_saved_is_what_all_batches_would_have_taken_less_what_they_took() -> None:
    misses, counters = PrefixTimer(cut=2, seconds=6.0, batches=3, spent=6.0), Counters(batches=3)
    account = Account(misses, counters)
    account.settle(2)
    assert (account.rows_read, account.seconds_saved) == (0, 0.0), "a batch that is computed saves nothing"
    counters.batches, counters.rows_read, counters.rows_advanced = 8, 64, {1: 16}
    counters.read_seconds, counters.write_seconds, misses.spent = 0.5, 0.25, 7.0
    account.settle(2)
    assert account.rows_read == 80
    assert account.seconds_saved == pytest.approx(5 * 2.0 - 1.0 - 0.5 - 0.25)


def test_images_for_a_model_without_a_frozen_block_are_no_loss() -> None:
    account = Account(PrefixTimer(spent=5.0), Counters())
    account.settle(0)
    assert (account.rows_read, account.seconds_saved) == (0, 0.0)


def test_a_batch_costs_what_images_and_forward_take_to_the_cut_and_not_what_shorter_forwards_do() -> None:
    misses = PrefixTimer()
    misses.restart(2)
    for stop in (1, 2):
        with misses.loading():
            pass
        with misses.running(0, stop):
            pass
    with misses.running(1, 2):
        pass
    assert misses.batches == 1 and misses.seconds < misses.spent
    assert misses.seconds_per_batch() == misses.seconds


@pytest.mark.parametrize(
    ("left", "until_move", "trained", "evaluated"),
    [
        (10.0, math.inf, (10.0, math.inf), (10.0, math.inf)),
        # In the middle of an epoch, whose end and four others are evaluated; the move is at the third's end.
        (4.5, 2.5, (4.5, 2.5), (5.0, 2.0)),
        (4.5, 0.5, (4.5, 0.5), (5.0, 0.0)),
        (3 - 1e-12, 1.0, (3.0, 1.0), (3.0, 0.0)),
        (0.0, 0.0, (0.0, 0.0), (1.0, 0.0)),
    ],
)
def test_evaluations_come_whole_and_at_the_ends_of_epochs(
    left: float, until_move: float, trained: tuple[float, ...], evaluated: tuple[float, ...]
) -> None:
    for name, passes in (("train", trained), ("test", evaluated)):
        split: Any = SimpleNamespace(name=name, passes_per_epoch=1.0)
        assert Horizon(left, until_move).passes(split) == passes


def test_a_directory_is_measured_once_and_its_free_space_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[int] = []
    monkeypatch.setattr(
        cache_decision, "measure_directory", lambda directory, *, most_bytes, **_: probes.append(most_bytes)
    )
    for most_bytes in (100, 100, 200):
        rates_of(tmp_path, row_bytes=10, batch_rows=2, most_bytes=most_bytes, warm=True)
    assert probes == [100, 200]
    monkeypatch.setattr(cache_decision, "free_bytes", lambda directory: 5)
    assert space_in(tmp_path)[0] == 5
    with pytest.raises(CacheFault, match="gone cannot be measured"):
        space_in(tmp_path / "gone")


def test_the_prefix_is_tried_once_at_a_cut_for_each_size_of_batch() -> None:
    unused: Any = SimpleNamespace()
    costs = CostInputs(unused, budget=unused, directory=Path(), memory_bytes=0)
    seen = []

    def run(x: Tensor, start: int, stop: int) -> Tensor:
        seen.append((stop, len(x)))
        return x

    few, many = torch.randn(32, 3), torch.randn(128, 3)
    for cut in (3, 4):
        first = [costs.trial(cut, run, images) for images in (few, many)]
        assert [costs.trial(cut, run, images) for images in (few, many)] == first
    assert seen == [(cut, rows) for cut in (3, 4) for rows in (32, 128) for _ in range(3)]
