from __future__ import annotations

from typing import Any

import pytest

from hvfreeze.config.sections import DataConfig
from hvfreeze.data.batches import deal
from hvfreeze.data.data_sets import open_data


@pytest.mark.parametrize(
    ("flags", "replicas", "said"),
    [
        (
            {},
            3,
            "each epoch leaves out 22 of 70 training samples, others each time: every shard makes 2 whole batches of 8",
        ),
        ({"shuffle": "global"}, 3, "leaves out 22 of 70"),
        (
            {"shard_sizes": "1,3"},
            2,
            "leaves out 38 of 70 training samples, others each time: every shard makes 2 whole",
        ),
        ({"train_samples": 64}, 4, ""),
    ],
)
def test_samples_that_fill_no_batch_are_told(flags: dict[str, Any], replicas: int, said: str) -> None:
    data = DataConfig(**{"train_samples": 70, **flags})
    corpus = deal(open_data("digits"), data, seed=0, batch_size=8, replicas=replicas)
    told = [note for note in corpus.notes if "leaves out" in note]
    assert len(told) == bool(said) and all(said in note for note in told), corpus.notes
