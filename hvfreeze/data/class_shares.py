"""Class imbalance, and the figures shown next to the accuracy of imbalanced data."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def majority_of(counts: ArrayLike) -> tuple[int, float] | None:
    """Return the most frequent class and its share of all samples; None if classes are balanced.

    `counts` are the samples of each class. They are balanced if the most frequent class has less than 1.5 times the
    samples of the rarest. The share is the accuracy of always predicting that class.
    """
    samples = np.asarray(counts, dtype=np.int64)
    if not samples.sum() or samples.max() < 1.5 * samples.min():
        return None
    largest = int(samples.argmax())
    return largest, float(samples[largest] / samples.sum())


def accuracy_in_words(
    accuracy: float, *, majority: float | None, balanced: float | None = None, digits: int = 2
) -> str:
    """Format an accuracy as a percentage, with balanced accuracy and majority class for imbalanced classes."""

    def percent(share: float) -> str:
        return f"{100 * share:.{digits}f} %"

    context = [] if balanced is None else [f"balanced {percent(balanced)}"]
    context += [] if majority is None else [f"majority class {percent(majority)}"]
    return percent(accuracy) + (f" ({', '.join(context)})" if context else "")
