from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hvfreeze.data.batches import choose, deal
from hvfreeze.data.data_sets import open_data
from hvfreeze.data.settings import DataConfig
from hvfreeze.errors import RefusedError


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
