"""A replica's batches: each view of each sample once, held-out samples, and samples that fill no batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hvfreeze.config.data import DataConfig
from hvfreeze.data import batches
from hvfreeze.data.batches import TrainFeed, augment_of, choose, deal, first_of, open_feeds, rows_at_once
from hvfreeze.data.data_sets import open_data
from hvfreeze.errors import RefusedError

REPLICAS, SAMPLES = 3, 50


def feeds(**settings: str) -> list[TrainFeed]:
    data = DataConfig(train_samples=SAMPLES, **settings)  # type: ignore[arg-type]
    corpus = deal(open_data("digits", None, image_size=None), data, seed=5, batch_size=4, replicas=REPLICAS)
    ranks = range(REPLICAS)
    return [open_feeds(corpus, data, seed=5, replica=r, budget_bytes=10**9)[0] for r in ranks]


@pytest.mark.parametrize("shuffle", ["shard", "global"])
@pytest.mark.parametrize(("augment", "views"), [("none", 1), ("views:3", 3)])
def test_every_view_of_every_sample_is_counted_once_over_all_replicas(shuffle: str, augment: str, views: int) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for feed in feeds(shuffle=shuffle, augment=augment):
        for batch in feed.every_view():
            assert len(batch.ids) == len(batch.views) == len(batch.labels) == 4
            assert np.array_equal(batch.labels, feed.strata[batch.ids])
            seen.update(zip(batch.ids[: batch.counted].tolist(), batch.views[: batch.counted].tolist()))
    assert len(seen) == SAMPLES * views and set(seen.values()) == {1}
    assert {view for _, view in seen} == set(range(views))


@pytest.mark.parametrize(
    ("batch_size", "shape", "rows"),
    [
        (32, (3, 32, 32), 128),
        (32, (3, 64, 64), 32),
        (16, (3, 224, 224), 16),
        (4, (4096,), 4),
    ],
)
def test_batches_that_train_nothing_are_larger_where_images_are_small(
    batch_size: int, shape: tuple[int, ...], rows: int
) -> None:
    assert rows_at_once(batch_size, shape) == rows


@pytest.mark.parametrize("shuffle", ["shard", "global"])
def test_some_of_the_samples_lie_evenly_among_them(shuffle: str) -> None:
    for feed in feeds(shuffle=shuffle):
        chosen = np.arange(len(feed.strata)) % 3 > 0
        own = feed.plan.owned(feed.replica)
        own = own[chosen[own]]
        some = np.flatnonzero(feed.some_of(chosen, 4))
        assert set(some) <= set(own) and len(some) == 4 and some[0] == own[0] and some[-1] == own[-1]
        assert np.flatnonzero(feed.some_of(chosen, 1000)).tolist() == sorted(own.tolist())


def test_the_first_samples_of_batches_come_in_other_batches_without_padding() -> None:
    padded = feeds(augment="views:3")[0].every_view()
    for count, rows in ((7, 5), (10**6, 5), (3, 128), (7, 1)):
        made = first_of(padded, count, rows=rows)
        for part in ("ids", "views", "labels"):
            whole = torch.cat([torch.as_tensor(getattr(batch, part))[: batch.counted] for batch in padded])[:count]
            assert torch.cat([torch.as_tensor(getattr(batch, part)) for batch in made]).equal(whole), part
        assert all(batch.counted == len(batch.ids) == rows for batch in made[:-1])
        assert 0 < made[-1].counted == len(made[-1].ids) <= rows
    assert first_of([], 7, rows=5) == []


@pytest.mark.parametrize("shuffle", ["shard", "global"])
def test_a_few_of_many_views_come_first_and_are_the_same_ones_for_any_replicas(
    shuffle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert feeds(augment="views:3")[0].sampled_views()[0] is None, "150 views are not many"
    monkeypatch.setattr(batches, "FEW_VIEWS", 40)
    few, others = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for feed in feeds(shuffle=shuffle, augment="views:3"):
        for seen, made in zip((few, others), feed.sampled_views(), strict=True):
            for batch in made or ():
                seen.update(zip(batch.ids[: batch.counted].tolist(), batch.views[: batch.counted].tolist()))
    ids = sorted({sample for sample, _ in [*few, *others]})
    assert {sample for sample, _ in few} == set(ids[::3])
    assert len(few) + len(others) == 3 * SAMPLES and set((few + others).values()) == {1}


def test_held_out_samples_are_the_same_for_all_replicas_and_a_part_of_each_class() -> None:
    found = feeds(augment="none")
    masks = [feed.held_out(0.2) for feed in found]
    assert all(np.array_equal(mask, masks[0]) for mask in masks)
    ids = np.flatnonzero(masks[0])
    assert len(ids) == 10
    assert set(ids) <= set(np.concatenate(found[0].plan.shards))
    assert Counter(found[0].strata[ids].tolist()).most_common()[0][1] <= 2


@pytest.mark.parametrize(
    ("augment", "solved", "mirrors", "kind"),
    [
        ("fresh", True, True, "mirrored"),
        ("none", True, True, "mirrored"),
        ("fresh", True, False, "none"),
        ("views:3", True, True, "views:3"),
        ("fresh", False, True, "fresh"),
    ],
)
def test_a_solved_head_sees_every_sample_as_it_is_and_mirrored_where_that_is_wanted(
    augment: str, solved: bool, mirrors: bool, kind: str
) -> None:
    found = augment_of(DataConfig(augment=augment), fits_head=solved, mirrors=mirrors)
    assert str(found) == kind


@pytest.mark.parametrize(
    ("flags", "replicas", "said"),
    [
        (
            {},
            3,
            "each epoch skips 22 of 70 training samples, different ones each time: every shard makes 2 whole batches",
        ),
        ({"shuffle": "global"}, 3, "skips 22 of 70"),
        (
            {"shard_sizes": "1,3"},
            2,
            "skips 38 of 70 training samples, different ones each time: every shard makes 2 whole",
        ),
        ({"train_samples": 64}, 4, ""),
    ],
)
def test_samples_that_fill_no_batch_are_told(flags: dict[str, Any], replicas: int, said: str) -> None:
    data = DataConfig(**{"train_samples": 70, **flags})
    corpus = deal(open_data("digits"), data, seed=0, batch_size=8, replicas=replicas)
    told = [note for note in corpus.notes if "skips" in note]
    assert len(told) == bool(said) and all(said in note for note in told), corpus.notes
    whole = deal(open_data("digits"), data, seed=0, batch_size=8, replicas=replicas, whole_batches=False)
    assert not [note for note in whole.notes if "skips" in note]


@pytest.mark.parametrize(("split", "fraction"), [("train", 0.0), ("train", 0.2), ("test", 0.0)])
def test_where_every_sample_of_a_split_is_broken_none_is_chosen(split: str, fraction: float) -> None:
    splits = open_data("digits")
    part = getattr(splits, split)
    broken = replace(part, broken={row: f"sample {row} is torn" for row in range(len(part.labels))})
    data = DataConfig(validation_fraction=fraction)
    name = "training" if split == "train" else "test"
    with pytest.raises(
        RefusedError, match=f"none of the .*{name} sample.* can be decoded: .*sample 0 is torn.*; repair the files"
    ):
        choose(replace(splits, **{split: broken}), data, seed=0)
    # The test set is not looked at where training samples are held out.
    if split == "test":
        choose(replace(splits, test=broken), replace(data, validation_fraction=0.2), seed=0)
