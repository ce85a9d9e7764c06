"""The chain in two parts, as a step sees it: the frozen prefix's output, computed or cached, and the trained suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvfreeze.chain.blocks import Chain
from hvfreeze.data.batches import Batch, announce
from hvfreeze.data.decoding import Images
from hvfreeze.prefix.caching import Caching, NoCache
from hvfreeze.runs.moves import Move


@dataclass
class Halves:
    """Runs blocks of a chain in the run's precision."""

    chain: Chain
    precision: str = "float32"

    def run(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of blocks start..stop-1, without gradient."""
        with torch.no_grad(), self._autocast():
            return self.chain.run(x, start, stop)

    def suffix(self, activations: Tensor, cut: int) -> Tensor:
        """Return the logits, (B, classes), with gradient where that is on."""
        with self._autocast():
            return self.chain.run(activations, cut, len(self.chain.blocks))

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bfloat16")


@dataclass
class Prefix:
    """Gives a batch's activations at the cut, and runs the suffix on them."""

    halves: Halves
    images: Images
    caching: NoCache | Caching

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Get ready for an epoch's batches, in order.

        Collective: every rank of the world must call this.
        """
        self.caching.begin_epoch(batches)
        announce(self.images, batches)

    def move(self, history: Sequence[Move]) -> None:
        """Follow the cut, the last entry of `history`.

        Collective: every rank of the world must call this in the same step.
        """
        self.caching.move(history)

    def get(self, batch: Batch) -> Tensor:
        """Return the frozen prefix's output for the batch; with cut 0 the images themselves."""
        return self.caching.activations.get(batch.ids, batch.views, counted=batch.counted)

    def suffix(self, activations: Tensor) -> Tensor:
        """Return the logits, (B, classes)."""
        return self.halves.suffix(activations, self.caching.activations.cut)

    def close(self) -> None:
        """Keep what is cached and let go of all files."""
        self.caching.activations.close()
