"""Subsets, shards and orders: complete, disjoint, balanced or skewed as asked, functions of their arguments alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvfreeze.data.shards import ShardPlan, apportion, plan_shards, split_held_out, stratified_subset
from hvfreeze.errors import UsageError

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), [211, 100, 150, 37, 2]))
IDS = np.arange(len(LABELS))
SIZES = [1, 2, 3, 4]


def plan(**changes: Any) -> ShardPlan:
    return plan_shards(LABELS, changes.pop("ids", IDS), **{"size": 3, "batch_size": 16, "seed": 5, **changes})


def per_class(ids: np.ndarray) -> np.ndarray:
    return np.bincount(LABELS[ids], minlength=5)


def met(plan: ShardPlan, epoch: int) -> np.ndarray:
    return np.concatenate([plan.epoch_order(epoch, rank).ravel() for rank in range(len(plan.shards))])


def test_apportion_deals_equal_weights_in_turn_and_others_in_proportion_everywhere() -> None:
    assert apportion([1, 1, 1], 7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert np.bincount(apportion([3, 0, 1], 100)).tolist() == [75, 0, 25]
    seats = apportion([5, 2, 1], 80)
    for start in range(64):
        counts = np.bincount(seats[start : start + 16], minlength=3)
        assert np.abs(counts - [10, 4, 2]).max() <= 1
    assert apportion([53, 24, 23], 7).tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert apportion([0, 0], 0).tolist() == []


@pytest.mark.parametrize("count", [5, 50, 333, 499, 500])
def test_a_subset_has_the_size_asked_for_and_every_class_in_its_share(count: int) -> None:
    ids = stratified_subset(LABELS, count, seed=1)
    assert len(set(ids)) == count
    assert np.abs(per_class(ids) - per_class(IDS) * count / len(IDS)).max() < 1.2
    assert per_class(ids).min() >= 1, "rare classes too"
    np.testing.assert_array_equal(ids, stratified_subset(LABELS, count, seed=1))
    assert count == 500 or set(ids) != set(stratified_subset(LABELS, count, seed=2))


@pytest.mark.parametrize("fraction", [0, 0.01, 0.1, 0.5, 0.99])
def test_training_and_validation_never_overlap_and_every_class_stays_in_training(fraction: float) -> None:
    pool = stratified_subset(LABELS, 400, seed=0)
    train, held = split_held_out(LABELS, pool, fraction=fraction, seed=1)
    assert not set(train) & set(held)
    assert set(train) | set(held) == set(pool)
    assert np.abs(per_class(held) - per_class(pool) * fraction).max() <= 1
    assert per_class(train).min() >= 1 and (len(held) > 0) == (fraction > 0)


@pytest.mark.parametrize("size", SIZES)
def test_shards_are_disjoint_complete_and_balanced_in_size_and_class(size: int) -> None:
    shards = plan(size=size).shards
    assert sorted(np.concatenate(shards)) == list(IDS)
    assert np.ptp([len(shard) for shard in shards]) <= 1
    assert np.ptp([per_class(shard) for shard in shards], axis=0).max() <= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shuffle", ["shard", "global"])
def test_steps_are_equal_and_no_sample_is_met_twice_in_an_epoch(size: int, shuffle: str) -> None:
    planned = plan(size=size, shuffle=shuffle)
    for epoch in range(3):
        orders = [planned.epoch_order(epoch, rank) for rank in range(size)]
        assert {order.shape for order in orders} == {(len(IDS) // size // 16, 16)}
        assert {order.dtype for order in orders} == {np.dtype(np.int64)}
        seen = met(planned, epoch)
        assert len(set(seen)) == len(seen)
        assert all(set(order.ravel()) <= set(shard) for order, shard in zip(orders, planned.shards, strict=True))


@pytest.mark.parametrize("shuffle", ["shard", "global"])
def test_the_order_is_a_function_of_seed_and_epoch(shuffle: str) -> None:
    first = met(plan(shuffle=shuffle), 4)
    np.testing.assert_array_equal(first, met(plan(shuffle=shuffle), 4))
    assert (first == met(plan(shuffle=shuffle), 5)).mean() < 0.1
    assert (first == met(plan(shuffle=shuffle, seed=6), 4)).mean() < 0.1
    assert (first == np.sort(first)).mean() < 0.1
    alone = [plan(shuffle=shuffle, size=1, seed=seed).epoch_order(0, 0) for seed in (5, 6)]
    assert (alone[0] == alone[1]).mean() < 0.1


def test_fixed_shards_drop_other_samples_every_epoch() -> None:
    planned = plan(size=2, batch_size=100)
    dropped = [set(planned.shards[1]) - set(planned.epoch_order(epoch, 1).ravel()) for epoch in range(2)]
    assert len(dropped[0]) == 50
    assert dropped[0] != dropped[1]


def test_a_global_step_of_all_ranks_covers_the_same_samples_at_every_size() -> None:
    alone = plan(size=1, batch_size=96, shuffle="global").epoch_order(2, 0)
    for size in (2, 3, 4):
        planned = plan(size=size, batch_size=96 // size, shuffle="global")
        together = np.concatenate([planned.epoch_order(2, rank) for rank in range(size)], axis=1)
        np.testing.assert_array_equal(np.sort(together), np.sort(alone))


def test_a_global_shuffle_brings_samples_to_other_ranks() -> None:
    planned = plan(size=2, shuffle="global")
    assert set(planned.epoch_order(0, 0).ravel()) != set(planned.epoch_order(1, 0).ravel())


@pytest.mark.parametrize("sizes", ["equal", [3.0, 1.0, 1.0], "3,1,1"])
@pytest.mark.parametrize("alpha", [0.01, 0.5, 100.0])
def test_dirichlet_shards_are_disjoint_complete_and_of_the_sizes_asked_for(alpha: float, sizes: Any) -> None:
    shards = plan(partition=f"dirichlet:{alpha}", shard_sizes=sizes).shards
    assert sorted(np.concatenate(shards)) == list(IDS)
    expected = [500 / 3] * 3 if sizes == "equal" else [300, 100, 100]
    assert np.abs(np.array([len(shard) for shard in shards]) - expected).max() <= 1


def test_a_smaller_dirichlet_parameter_skews_labels_more() -> None:
    def distance(partition: str, seed: int) -> float:
        shards = plan(partition=partition, seed=seed).shards
        shares = np.array([per_class(shard) / len(shard) for shard in shards])
        return float(np.abs(shares - per_class(IDS) / len(IDS)).sum(axis=1).mean())

    partitions = ["dirichlet:0.05", "dirichlet:0.5", "dirichlet:5", "dirichlet:500", "iid"]
    means = [np.mean([distance(partition, seed) for seed in range(10)]) for partition in partitions]
    assert means == sorted(means, reverse=True)
    assert means[0] > 0.8
    assert means[3] < 0.1


def test_listed_sizes_stay_class_balanced_without_skew() -> None:
    shards = plan(shard_sizes=[4.0, 2.0, 1.0]).shards
    for shard in shards:
        assert np.abs(per_class(shard) - per_class(IDS) * len(shard) / len(IDS)).max() <= 1.5
    assert plan(shard_sizes=[4.0, 2.0, 1.0]).batches_per_epoch == len(shards[2]) // 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": IDS[:2]}, ["2 training samples", "3 shards", "fewer ranks"]),
        ({"batch_size": 167}, ["--batch-size (167)", "shard 2 of 3 has 166 of 500", "use --batch-size 166 or less"]),
        ({"batch_size": 167, "shuffle": "global"}, ["--batch-size (167)", "has 166", "166 or less"]),
        ({"batch_size": 0}, ["--batch-size (0)", "at least 1"]),
        ({"partition": "dirichlet:0"}, ["--partition (dirichlet:0)", "A > 0"]),
        ({"partition": "dirichlet:-1"}, ["--partition", "A > 0"]),
        ({"partition": "dirichlet:nan"}, ["--partition", "A > 0"]),
        ({"partition": "dirichlet:inf"}, ["--partition", "A > 0"]),
        ({"partition": "dirichlet:"}, ["--partition", "A > 0"]),
        ({"partition": "zipf:2"}, ["--partition (zipf:2)", "iid, or dirichlet:A"]),
        ({"shard_sizes": [1.0, 2.0]}, ["--shard-sizes (1,2)", "3 numbers, one for each shard"]),
        ({"shard_sizes": [1.0, 2.0, 0.0]}, ["--shard-sizes (1,2,0)", "positive"]),
        ({"shard_sizes": [1.0, 2.0, float("inf")]}, ["--shard-sizes", "finite"]),
        ({"shard_sizes": "even"}, ["--shard-sizes (even)", "equal"]),
        ({"shard_sizes": [1e6, 1e6, 1.0]}, ["shard 2 of 3 has 0 of 500", "less uneven"]),
        ({"shuffle": "sorted"}, ["--shuffle (sorted)", "shard, global"]),
        ({"shuffle": "global", "partition": "dirichlet:1"}, ["--shuffle (global)", "shard with --partition dirichlet"]),
        ({"shuffle": "global", "shard_sizes": [1.0, 1.0, 2.0]}, ["--shuffle (global)", "--shard-sizes"]),
        ({"count": 0}, ["--train-samples (0)", "at least 5"]),
        ({"count": 4}, ["--train-samples (4)", "at least 5"]),
        ({"count": 501}, ["--train-samples (501)", "at most 500"]),
    ],
)
def test_what_is_impossible_is_refused_with_the_way_out(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as refusal:
        if "count" in changes:
            stratified_subset(LABELS, **changes, seed=0)
        else:
            plan(**changes)
    for word in words:
        assert word in str(refusal.value)
