from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from hvfreeze.data.batches import Batch
from hvfreeze.strategies.grid.partitioning import (
    Partitioning,
    cut_again,
    micro_batches_of,
    next_partitioning,
    shorter_lines,
    transfers,
)
from tests.program import call

FOUR = Partitioning(((0, 2), (2, 4), (4, 6), (6, 8)))
EVEN = [1.0] * 8


def after(now: Partitioning, cut: int, *, cached: bool = False, micro_batches: int = 8) -> Partitioning | None:
    return next_partitioning(now, cut=cut, cached=cached, step=5, costs=EVEN, first=4, micro_batches=micro_batches)


def test_ranks_form_new_lines_when_as_many_as_train_make_whole_lines() -> None:
    assert after(FOUR, 1) is None, "every rank trains"
    assert after(FOUR, 2) is None and after(FOUR, 3) is None, "three that train are not to become two"
    two = after(FOUR, 4)
    assert two is not None and (two.parts, two.step, two.cached) == (2, 5, False)
    one = after(FOUR, 6)
    assert one is not None and one.segments == ((0, 8),)


def test_what_is_cached_takes_no_rank() -> None:
    two = after(FOUR, 2, cached=True)
    assert two is not None and two.segments == ((0, 5), (5, 8)), "six blocks are left to two"
    computed = after(FOUR, 4)
    assert computed is not None and computed.segments == ((0, 5), (5, 8)), "frozen blocks cost a third"
    assert after(computed, 4) is None, "all train"
    assert after(two, 2, cached=True) is None, "nothing is left to do"


def test_segments_are_shared_out_again_when_their_frozen_part_comes_to_be_cached() -> None:
    costs = [9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    frozen = next_partitioning(FOUR, cut=4, cached=False, step=1, costs=costs, first=4, micro_batches=4)
    assert frozen is not None and frozen.segments == ((0, 5), (5, 8))
    cached = next_partitioning(frozen, cut=4, cached=True, step=3, costs=costs, first=4, micro_batches=4)
    assert cached is not None and cached.segments == ((0, 6), (6, 8)) and cached.cached


def test_lines_that_cannot_share_a_batch_evenly_are_not_made() -> None:
    assert shorter_lines(4, micro_batches=2) == [2] and shorter_lines(3, micro_batches=4) == []
    assert shorter_lines(6, micro_batches=6) == [1, 2, 3]
    found = after(FOUR, 6, micro_batches=2)
    assert found is not None and found.parts == 2


@pytest.mark.parametrize(("cut", "parts"), [(0, 1), (0, 2), (3, 2), (6, 1), (6, 2)])
def test_every_partition_trains(cut: int, parts: int) -> None:
    for cached in (False, True):
        segments = cut_again(EVEN, cut=cut, cached=cached, parts=parts)
        assert segments[0][0] == 0 and segments[-1][1] == 8 and len(segments) == parts
        assert all(before[1] == after[0] for before, after in pairwise(segments))
        assert all(stop > cut for _, stop in segments)


def test_every_block_comes_from_a_rank_that_has_it() -> None:
    before, after = [FOUR.segments[place] for place in range(4)], [((0, 6), (6, 8))[place % 2] for place in range(4)]
    moves = transfers(before, after)
    for place, (start, stop) in enumerate(after):
        held = set(range(*before[place])) | {block for block, _, to in moves if to == place}
        assert held >= set(range(start, stop))
    assert all(block in range(*before[source]) and source != to for block, source, to in moves)
    assert len(moves) == len({(block, to) for block, _, to in moves}), "nothing comes twice"


@pytest.mark.parametrize(("rows", "lines"), [(8, 1), (8, 2), (11, 4), (4, 4)])
def test_lines_share_a_batch_by_whole_micro_batches(rows: int, lines: int) -> None:
    batch = Batch(np.arange(rows), np.zeros(rows, np.int64), torch.arange(rows), rows)
    parts = [part for line in range(lines) for part in micro_batches_of(batch, micro_batches=4, lines=lines, line=line)]
    expected = torch.arange(rows).tensor_split(4)
    assert [part.labels.tolist() for part in parts] == [labels.tolist() for labels in expected]
    assert [part.counted for part in parts] == [len(labels) for labels in expected]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "the cuts, .* use --cut-by params or count for"),
        ("--cut-by count --augment none --cache auto", "the cache, .* use --cache on or off for"),
        ("--augment none --cache auto", "the cuts and the cache, .* --cut-by params or count and --cache on or off"),
        ("--cut-by count --augment none --cache on", ""),
        ("--redeal off", ""),
    ],
)
def test_that_a_measured_partition_changes_digits_is_said(tmp_path: Path, flags: str, said: str) -> None:
    small = "train --strategy grid --redeal on --model mlp-8 --train-samples 40 --batch-size 20 --epochs 1 --threads 1"
    outcome = call(*small.split(), "--run-dir", str(tmp_path / "run"), *flags.split())
    found = re.search(f"measured times determine {said}", outcome.stdout)
    assert outcome.returncode == 0 and (found is not None) is bool(said), str(outcome)


@pytest.mark.parametrize(("statistics", "code"), [("batch", 2), ("kept", 0)])
def test_micro_batches_of_one_sample_train_where_norms_keep_their_statistics(
    tmp_path: Path, statistics: str, code: int
) -> None:
    small = "train --strategy grid --model mlp-8 --train-samples 40 --batch-size 8 --micro-batches 8 --epochs 1"
    outcome = call(*small.split(), "--threads", "1", "--statistics", statistics, "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == code and ("at least 2 samples" in outcome.stderr) is bool(code), str(outcome)
