"""Weights of classes and of samples in the loss, scaled to mean 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def class_weights(counts: Tensor, given: str | Mapping[int, float] | Sequence[float]) -> tuple[float, ...]:
    """Return the weight of each class, scaled to mean 1 over samples; `counts`, (classes,), are the samples per class.

    `given` is `balanced`, n / (classes x count) as in scikit-learn, or relative weights; classes missing in a mapping
    have 1. A class without samples has the weight of a class with one sample. Counts may be sums of sample weights.
    """
    if isinstance(given, str):
        relative = 1 / torch.where(counts > 0, counts.double(), 1)
    else:
        known = given if isinstance(given, Mapping) else dict(enumerate(given))
        relative = torch.tensor([float(known.get(place, 1.0)) for place in range(len(counts))], dtype=torch.float64)
    mean = (relative * counts).sum() / counts.sum()
    return tuple((relative / mean).tolist()) if mean > 0 else (1.0,) * len(counts)


def find_odd_weight(weights: NDArray[np.float64]) -> int | None:
    """Return the first row whose weight is no number of at least 0; None if there is none."""
    odd = np.flatnonzero(~((weights >= 0) & (weights <= np.finfo(np.float32).max)))
    return int(odd[0]) if len(odd) else None


LEAST_WEIGHT = 1e-6
"""Least sample weight, relative to the mean; smaller ones would be lost in rounding."""


def scaled_weights(given: Tensor, samples: Tensor) -> Tensor:
    """Return sample weights with mean 1 over `samples`, (N,) float32. Weights of 0 do not occur among these."""
    return (given.double() / given[samples].double().mean()).clamp(min=LEAST_WEIGHT).float()
