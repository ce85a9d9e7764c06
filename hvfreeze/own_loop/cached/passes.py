"""Passes through a script's model in front of a cut: what they take, read once, and what is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvfreeze.chain.watched.calls import Inputs
from hvfreeze.own_loop.cached.halves import Halves, autocast
from hvfreeze.own_loop.cached.samples import Ids, Remembered, Samples


@dataclass(frozen=True)
class BatchActivations:
    """What the blocks before a cut gave for a batch.

    Attributes:
        cut: number of blocks; 0 stands for the inputs themselves.
        tensor: their output, (B, ...); None at cut 0.
        inputs: of the model, at cut 0; behind it, the tensors among them that the suffix looks at.
    """

    cut: int
    tensor: Tensor | None
    inputs: Any


class Passes:
    """Reads samples for training and for the blocks before a cut, and runs those.

    Attributes:
        whole: whether the model runs as a whole, so that nothing is asked for behind a cut.
        labels: of the samples that were read.
        inputs: what the part behind a cut looks at, of samples that were read while there was one.
    """

    def __init__(self, samples: Samples, halves: Halves, *, dtype: torch.dtype | None) -> None:
        self.whole = True
        self.labels, self.inputs = (Remembered(len(samples), samples.num_views) for _ in range(2))
        self._samples, self._halves, self._dtype = samples, halves, dtype
        self._given: Inputs | None = None
        self._pairs: tuple[Ids, Ids] | None = None

    def read(self, ids: Ids, views: Ids) -> tuple[Inputs, Any]:
        """Return the inputs and labels of these samples, and remember what will be asked for behind a cut."""
        inputs, labels = self._samples.load(ids, views)
        self.labels.put(ids, views, labels)
        if not self.whole and not self._halves.needs_inputs:
            self.inputs.put(ids, views, self._halves.kept(inputs))
        return inputs, labels

    def remembers(self, ids: Ids, views: Ids) -> bool:
        """Tell whether nothing but the prefix's output is lacking of these samples."""
        if self.whole or self._halves.needs_inputs or self.labels.get(ids, views) is None:
            return False
        return self.inputs.get(ids, views) is not None

    def expect(self, ids: Ids, views: Ids, inputs: Inputs | None = None) -> None:
        """Take this batch for the one that passes are about, with its inputs where they have been read."""
        self._given, self._pairs = inputs, (ids, views)

    def load(self, ids: Ids, views: Ids) -> Any:
        """Return the inputs of a padded batch, those of the batch at hand where they are these."""
        pairs = self._pairs
        these = pairs is not None and np.array_equal(pairs[0], ids) and np.array_equal(pairs[1], views)
        if self._given is None or not these:
            self._given, _ = self.read(ids, views)
        self._pairs = (ids, views)
        return self._given

    def run(self, x: Any, start: int, stop: int) -> Tensor:
        """Return the output of blocks start..stop-1 for `x`, a batch's inputs where start is 0."""
        inputs: Any = x if start == 0 else None
        if start > 0 and self._halves.runs_inside and self._pairs is not None:
            ids, views = self._pairs
            inputs = self.load(np.resize(ids, len(x)), np.resize(views, len(x)))
        with torch.no_grad(), autocast(self._dtype):
            return self._halves.before(x, start, stop, inputs)
