"""What a cached loader remembers of batches, and what it cannot keep."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hvfreeze.errors import UsageError
from hvfreeze.integration.samples import Remembered, Samples, inputs_and_labels

IDS, VIEWS = np.array([2, 0]), np.zeros(2, np.int64)


def test_what_was_put_comes_back_in_any_order_once_all_of_it_is_known() -> None:
    remembered = Remembered(3, 1)
    remembered.put(IDS, VIEWS, {"labels": torch.tensor([5, 7])})
    assert remembered.get(np.array([0, 2]), VIEWS)["labels"].tolist() == [7, 5]
    assert remembered.get(np.array([0, 1]), VIEWS) is None


@pytest.mark.parametrize("mapping", [dict, UserDict, OrderedDict])
def test_mappings_are_loaded_as_dicts_also_inside_others(mapping: Any) -> None:
    def split(batch: Any) -> Any:
        return mapping(x=batch[0], more=[mapping(y=batch[0])]), (mapping(label=batch[1]), 3)

    loader = DataLoader(TensorDataset(torch.arange(4.0), torch.arange(4)), batch_size=2)
    inputs, labels = Samples(loader, split, num_views=1, seed=0).load(IDS, VIEWS)
    assert [type(part) for part in (inputs, inputs["more"][0], labels[0])] == [dict] * 3
    assert inputs["more"][0]["y"].tolist() == labels[0]["label"].tolist() == [2, 0] and labels[1] == 3


@pytest.mark.parametrize("views", [1, 2])
def test_random_states_stay_as_they_were_where_a_sample_cannot_be_read(views: int) -> None:
    class Draws(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, row: int) -> Any:
            raise OSError(random.random() + np.random.rand() + torch.rand(()).item())

    def states() -> Any:
        name, words, *others = np.random.get_state()
        return random.getstate(), name, tuple(words), others, tuple(torch.get_rng_state().tolist())

    samples, before = Samples(DataLoader(Draws(), batch_size=2), inputs_and_labels, num_views=views, seed=0), states()
    with pytest.raises(OSError):
        samples.load(IDS, VIEWS)
    assert states() == before


@pytest.mark.parametrize("values", [torch.tensor(3), torch.ones(3), [torch.ones(2), "name"]])
def test_what_is_not_one_row_a_sample_is_refused(values: Any) -> None:
    with pytest.raises(UsageError, match="one row per sample"):
        Remembered(3, 1).put(IDS, VIEWS, values)


def test_rows_of_another_length_are_refused() -> None:
    remembered = Remembered(4, 1)
    remembered.put(IDS, VIEWS, torch.ones(2, 5))
    with pytest.raises(UsageError, match="pad them to one length"):
        remembered.put(IDS + 1, VIEWS, torch.ones(2, 6))


def test_another_nesting_is_refused() -> None:
    remembered = Remembered(4, 1)
    remembered.put(IDS, VIEWS, [torch.ones(2, 5)])
    with pytest.raises(UsageError, match="in the previous batch"):
        remembered.put(IDS + 1, VIEWS, [torch.ones(2, 5), torch.ones(2, 5)])
