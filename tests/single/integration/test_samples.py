"""What a cached loader remembers of batches, and what it cannot keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hvfreeze.errors import UsageError
from hvfreeze.integration.samples import Remembered

IDS, VIEWS = np.array([2, 0]), np.zeros(2, np.int64)


def test_what_was_put_comes_back_in_any_order_once_all_of_it_is_known() -> None:
    remembered = Remembered(3, 1)
    remembered.put(IDS, VIEWS, {"labels": torch.tensor([5, 7])})
    assert remembered.get(np.array([0, 2]), VIEWS)["labels"].tolist() == [7, 5]
    assert remembered.get(np.array([0, 1]), VIEWS) is None


@pytest.mark.parametrize("values", [torch.tensor(3), torch.ones(3), [torch.ones(2), "name"]])
def test_what_is_not_one_row_a_sample_is_refused(values: Any) -> None:
    with pytest.raises(UsageError, match="one row a sample"):
        Remembered(3, 1).put(IDS, VIEWS, values)


def test_rows_of_another_length_are_refused() -> None:
    remembered = Remembered(4, 1)
    remembered.put(IDS, VIEWS, torch.ones(2, 5))
    with pytest.raises(UsageError, match="pad them to one length"):
        remembered.put(IDS + 1, VIEWS, torch.ones(2, 6))


def test_another_nesting_is_refused() -> None:
    remembered = Remembered(4, 1)
    remembered.put(IDS, VIEWS, [torch.ones(2, 5)])
    with pytest.raises(UsageError, match="in the batch before as"):
        remembered.put(IDS + 1, VIEWS, [torch.ones(2, 5), torch.ones(2, 5)])
