"""Loss and accuracy over a whole split: every sample counted once, one reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.chain.blocks import Chain
from hvfreeze.data.feed import Batch
from hvfreeze.prefix.features import Prefix
from hvfreeze.ranks.world import World


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


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a chain on this rank's share of a split."""

    chain: Chain
    world: World
    prefix: Prefix
    batches: Sequence[Batch] = field(default_factory=list)

    def evaluate(self) -> tuple[float, float]:
        """Return (mean loss, accuracy in 0-1) over the whole split; leaves the model in training mode.

        Running statistics must have been averaged. Collective: every rank of the world must call this.
        """
        self.chain.model.eval()
        totals = Totals()
        with torch.no_grad():
            self.prefix.begin_epoch(self.batches)
            for batch in self.batches:
                activations = self.prefix.get(batch)
                logits = self.prefix.suffix(activations).float()[: batch.counted]
                labels = batch.labels[: batch.counted]
                loss = functional.cross_entropy(logits.double(), labels, reduction="mean")
                totals.add(logits, labels, float(loss))
        self.chain.model.train()
        return totals.reduce(self.world, name="evaluation")
