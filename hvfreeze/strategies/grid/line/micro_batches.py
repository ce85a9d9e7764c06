"""A batch in parts: which samples a line works on, and what is known of them on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvfreeze.data.batches import Batch
from hvfreeze.strategies.grid.line.trial import sizes_of
from hvfreeze.strategies.strategy import Answers


@dataclass(frozen=True)
class Rows:
    """Which of a batch's samples a line works on, and in which micro-batches."""

    micro_batches: int
    """Of the whole batch."""
    lines: int = 1
    """That share a replica's batches, each as many micro-batches."""
    line: int = 0
    """Which of them."""

    @property
    def count(self) -> int:
        """How many micro-batches of a batch the line works on."""
        return self.micro_batches // self.lines

    def of(self, batch: Batch) -> list[Batch]:
        """Return this line's micro-batches of a batch, in order; the first ones of the batch may have a sample more."""
        starts = [0, *accumulate(sizes_of(len(batch.ids), self.micro_batches))]
        mine = range(self.line * self.count, (self.line + 1) * self.count)
        return [some_of(batch, starts[place], starts[place + 1]) for place in mine]


def some_of(batch: Batch, start: int, stop: int) -> Batch:
    """Return the samples start..stop-1 of a batch."""
    counted = max(0, min(batch.counted, stop) - start)
    return Batch(batch.ids[start:stop], batch.views[start:stop], batch.labels[start:stop], counted)


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the samples of batches one after the other."""
    ids, views = (np.concatenate(each) for each in zip(*[(batch.ids, batch.views) for batch in batches], strict=True))
    return Batch(ids, views, torch.cat([batch.labels for batch in batches]), sum(batch.counted for batch in batches))


class Part(NamedTuple):
    """A micro-batch."""

    batch: Batch
    """Its samples."""
    siblings: Sequence[Batch]
    """All micro-batches of its batch that go through this line."""
    place: int
    """Its own among them."""


class Kept(NamedTuple):
    """A micro-batch between its forward and its backward pass."""

    input: Tensor
    """With the error in `grad` after the backward pass, where the partition before trains."""
    output: Tensor
    """With gradient; on the last partition the loss, weighted by its share of the step's samples."""


class Learnt(NamedTuple):
    """What the last partition knows after a step."""

    loss: float
    """The mean over the line's samples."""
    share: float
    """The loss's part in the step's, which is the mean of this over all lines."""
    answers: Answers
