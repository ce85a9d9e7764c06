"""Loss and accuracy over a whole split: every sample counted once for each model, one reduction for all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.comm.world import World
from hvfreeze.data.batches import Batch
from hvfreeze.model.answers import classes_of
from hvfreeze.strategies.base import MODEL, Answers, Strategy


class Score(NamedTuple):
    """Means over samples."""

    loss: float
    accuracy: float
    """0-1."""


class Best(NamedTuple):
    """The best that a model was after any evaluation so far."""

    epoch: int
    step: int
    accuracy: float
    loss: float
    parameter_digest: str
    """Of all models, where this one is kept; else empty."""

    def below(self, score: Score) -> bool:
        """Tell whether a score is better: more is right, or with as much right the loss is lower; NaN is highest."""
        ours, theirs = (math.inf if math.isnan(loss) else loss for loss in (self.loss, score.loss))
        return (score.accuracy, -theirs) > (self.accuracy, -ours)


Scores = dict[str, Score]
"""By model."""


@dataclass
class Totals:
    """Sums over samples on this rank; `reduce` turns them into global means."""

    loss: float = 0.0
    correct: int = 0
    count: int = 0

    def add(self, logits: Tensor, labels: Tensor, mean_loss: float) -> None:
        """Add a batch: its answers, and their mean loss; each character of a window counts as one."""
        self.loss += mean_loss * labels.numel()
        self.correct += int((classes_of(logits) == labels).sum())
        self.count += labels.numel()


def count(totals: dict[str, Totals], answers: Mapping[str, Answers], losses: Mapping[str, float]) -> None:
    """Add a batch's answers and mean losses, by model."""
    for name, (logits, labels) in answers.items():
        totals.setdefault(name, Totals()).add(logits, labels, losses[name])


def reduce(totals: Mapping[str, Totals], models: Sequence[str], world: World, *, name: str) -> Scores:
    """Return each model's means over the samples that all ranks have counted. Collective."""
    mine = [totals.get(model, Totals()) for model in models]
    sums = torch.tensor([[each.loss, each.correct, each.count] for each in mine], dtype=torch.float64)
    rows = world.allreduce_sum(sums, name=f"totals.{name}").tolist()
    return {
        model: Score(loss / max(count, 1), correct / max(count, 1))
        for model, (loss, correct, count) in zip(models, rows, strict=True)
    }


def evaluate(strategy: Strategy, batches: Sequence[Batch], world: World) -> Scores:
    """Return each model's means over a split, of which `batches` are this replica's share. Collective.

    The strategy must have settled. Where several ranks answer for one model on the same samples, no mean changes.
    """
    totals: dict[str, Totals] = {}
    strategy.begin_epoch(batches, training=False)
    for batch in batches:
        said = strategy.predict(batch)
        real = {
            name: Answers(logits[: batch.counted], labels[: batch.counted]) for name, (logits, labels) in said.items()
        }
        losses = {
            name: float(functional.cross_entropy(logits.double(), labels)) for name, (logits, labels) in real.items()
        }
        count(totals, real, losses)
    return reduce(totals, strategy.models, world, name="evaluation")


def mean(scores: Scores) -> Score:
    """Return the mean over models, each of which counts the same."""
    losses, accuracies = zip(*scores.values(), strict=True)
    return Score(sum(losses) / len(losses), sum(accuracies) / len(accuracies))


def by_model(models: Sequence[str], **parts: Scores) -> dict[str, Any]:
    """Return the entry `models` of a line of the record; there is none where one model is all."""
    if list(models) == [MODEL]:
        return {}
    return {
        "models": {
            name: {
                f"{part}_{key}": value
                for part, scores in parts.items()
                if scores
                for key, value in scores[name]._asdict().items()
            }
            for name in models
        }
    }
