"""Whether classes are unequal, so that an accuracy says little by itself, and what is said beside it then."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

UNEQUAL = 1.5
"""The most frequent class has so many times the samples of the rarest, or more; that may have none."""


def majority_of(counts: ArrayLike) -> tuple[int, float] | None:
    """Return the most frequent class and its share of all samples where classes are unequal, else None.

    `counts` are each class's samples. An answer that is always that class is right as often as its share.
    """
    samples = np.asarray(counts, dtype=np.int64)
    if not samples.sum() or samples.max() < UNEQUAL * samples.min():
        return None
    largest = int(samples.argmax())
    return largest, float(samples[largest] / samples.sum())


def accuracy_in_words(
    accuracy: float, *, majority: float | None, balanced: float | None = None, digits: int = 2
) -> str:
    """Return an accuracy as a percentage, and where classes are unequal what tells how good it is."""

    def percent(share: float) -> str:
        return f"{100 * share:.{digits}f} %"

    beside = [] if balanced is None else [f"balanced {percent(balanced)}"]
    beside += [] if majority is None else [f"majority class {percent(majority)}"]
    return percent(accuracy) + (f" ({', '.join(beside)})" if beside else "")
