"""Loss and accuracy over a whole split: every sample counted once, one reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.data.batches import Batch
from hvfreeze.ranks.world import World
from hvfreeze.strategies.strategy import Strategy


@dataclass
class Totals:
    """Sums over samples on this rank; `reduce` turns them into global means."""

    loss: float = 0.0
    correct: int = 0
    count: int = 0

    def add(self, logits: Tensor, labels: Tensor, mean_loss: float) -> None:
        """Add a training batch: (B, classes) logits, (B,) labels and the batch's mean loss."""
        self.loss += mean_loss * len(labels)
        self.correct += int((logits.argmax(1) == labels).sum())
        self.count += len(labels)

    def reduce(self, world: World, *, name: str) -> tuple[float, float]:
        """Return (mean loss, accuracy in 0-1) over the samples of all ranks.

        Collective: every rank of `world` must call this.
        """
        mine = torch.tensor([self.loss, self.correct, self.count], dtype=torch.float64)
        loss, correct, count = world.allreduce_sum(mine, name=f"totals.{name}").tolist()
        return loss / max(count, 1), correct / max(count, 1)


def evaluate(strategy: Strategy, batches: Sequence[Batch], world: World) -> tuple[float, float]:
    """Return (mean loss, accuracy in 0-1) over a split, of which `batches` are this replica's share.

    The strategy must have settled. Ranks of one replica count the same samples, which changes no mean.
    Collective: every rank of `world` must call this.
    """
    totals = Totals()
    strategy.begin_epoch(batches, training=False)
    for batch in batches:
        logits = strategy.predict(batch)[: batch.counted]
        labels = batch.labels[: batch.counted]
        loss = functional.cross_entropy(logits.double(), labels, reduction="mean")
        totals.add(logits, labels, float(loss))
    return totals.reduce(world, name="evaluation")
