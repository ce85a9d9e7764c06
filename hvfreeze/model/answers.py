"""The class that logits stand for."""

from __future__ import annotations

from torch import Tensor

from hvfreeze.wording import plural

NO_ANSWER = -2
"""In place of a class, where a model's output overflows."""


def classes_of(logits: Tensor) -> Tensor:
    """Return the most probable class of (B, classes, ...) logits, (B, ...) int64, NO_ANSWER where that is not finite.

    To the largest of numbers NaN would be the first class, and a model that overflows right as often as that occurs.
    """
    return logits.argmax(1).masked_fill(~logits.amax(1).isfinite(), NO_ANSWER)


def note_on_missing(count: int, of: int) -> str:
    """Return a sentence on `count` samples without an answer."""
    samples = f"{count} of {plural(of, 'sample')}"
    return f"{samples} have no answer, as the model's output for them is not finite; train it with a lower --lr"
