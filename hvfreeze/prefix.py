"""The chain in two parts, as a step sees it: the frozen prefix's output, computed or cached, and the trained suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvfreeze.blocks import Chain
from hvfreeze.clock import PhaseClock
from hvfreeze.feed import Batch, Images, announce


@dataclass
class Prefix:
    """Runs a batch through the frozen prefix without gradient, and the suffix with."""

    chain: Chain
    images: Images
    clock: PhaseClock
    precision: str = "float32"
    cut: int = 0

    def begin_epoch(self, epoch: int, batches: Sequence[Batch]) -> None:
        """Get ready for an epoch's batches."""
        self.announce(batches)

    def move(self, cut: int) -> None:
        """Follow the cut."""
        self.cut = cut

    def report(self) -> dict[str, object]:
        """Return what the cache did so far."""
        return {"mode": "off"}

    def announce(self, batches: Sequence[Batch]) -> None:
        """Tell which batches come next, in order."""
        announce(self.images, batches)

    def get(self, batch: Batch) -> Tensor:
        """Return the frozen prefix's output for the batch; with cut 0 the images themselves."""
        with self.clock.within("data"):
            images = self.images.load(batch.ids, batch.views)
        return self.run(images, 0, self.cut)

    def run(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of the frozen blocks start..stop-1, without gradient."""
        with torch.no_grad(), self._autocast():
            return self.chain.run(x, start, stop)

    def suffix(self, activations: Tensor) -> Tensor:
        """Return the logits, (B, classes)."""
        with self._autocast():
            return self.chain.run(activations, self.cut, len(self.chain.blocks))

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bfloat16")
