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
from hvfreeze.data.class_shares import balanced_accuracy, majority_of
from hvfreeze.model.answers import classes_of
from hvfreeze.strategies.base import MODEL, Answers, OpenModel


class Score(NamedTuple):
    """Means over samples."""

    loss: float
    accuracy: float
    """0-1."""
    balanced_accuracy: float | None = None
    """The mean over classes of the accuracy on their samples; None where classes are equal, see `class_shares`."""
    majority_share: float | None = None
    """Of the most frequent class among the samples; None where classes are equal."""

    @property
    def described(self) -> str:
        """It in words."""
        return f"accuracy {100 * self.accuracy:.1f} %, loss {self.loss:.3f}"


class Mean(NamedTuple):
    """Means over models."""

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
    balanced_accuracy: float | None = None
    majority_share: float | None = None

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
    weight: float = 0.0
    """By which the loss is divided."""
    correct: int = 0
    count: int = 0

    @classmethod
    def read(cls, sums: Mapping[str, Any]) -> Totals:
        """Return the sums of a checkpoint; those of earlier versions divide the loss by the samples."""
        return cls(**{"weight": sums["count"], **sums})

    def add(self, logits: Tensor, labels: Tensor, mean_loss: float, *, weight: float | None = None) -> None:
        """Add a batch's answers and mean loss, of so much weight; each character of a window counts as one."""
        weight = labels.numel() if weight is None else weight
        self.loss += mean_loss * weight
        self.weight += weight
        self.correct += int((classes_of(logits) == labels).sum())
        self.count += labels.numel()


def count(totals: dict[str, Totals], answers: Mapping[str, Answers], losses: Mapping[str, float]) -> None:
    """Add a batch's answers and mean losses, by model."""
    for name, (logits, labels) in answers.items():
        totals.setdefault(name, Totals()).add(logits, labels, losses[name])


def reduce(totals: Mapping[str, Totals], models: Sequence[str], world: World, *, name: str) -> Scores:
    """Return each model's means over the samples that all ranks have counted. Collective."""
    mine = [totals.get(model, Totals()) for model in models]
    sums = torch.tensor([[each.loss, each.weight, each.correct, each.count] for each in mine], dtype=torch.float64)
    rows = world.allreduce_sum(sums, name=f"totals.{name}").tolist()
    return {
        model: Score(loss / max(weight, 1e-9), correct / max(count, 1))
        for model, (loss, weight, correct, count) in zip(models, rows, strict=True)
    }


def evaluate(strategy: OpenModel, batches: Sequence[Batch], world: World) -> Scores:
    """Return each model's means over a split, of which `batches` are this replica's share. Collective.

    The strategy must have settled. Where several ranks answer for one model on the same samples, no mean changes.
    """
    totals: dict[str, Totals] = {}
    tallies: dict[str, Tensor] = {}
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
        for name, (logits, labels) in real.items():
            # A text's characters are no classes that anybody would balance.
            if labels.dim() == 1:
                tallies[name] = tally(logits, labels) + tallies.get(name, 0)
    scores = reduce(totals, strategy.models, world, name="evaluation")
    everyone = world.allgather_object(tallies, name="evaluation.classes")
    for name, score in scores.items():
        counts = [theirs[name] for theirs in everyone if name in theirs]
        scores[name] = balanced(score, torch.stack(counts).sum(0)) if counts else score
    return scores


def tally(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (2, classes) int64: each class's samples, and how many of them are answered right."""
    classes = logits.shape[1]
    right = labels[classes_of(logits) == labels]
    return torch.stack([torch.bincount(each, minlength=classes) for each in (labels, right)])


def balanced(score: Score, counts: Tensor) -> Score:
    """Return a score with what must be known beside it where classes are unequal; for `counts` see `tally`."""
    majority = majority_of(counts[0])
    if majority is None:
        return score
    return score._replace(balanced_accuracy=balanced_accuracy(counts[0], counts[1]), majority_share=majority[1])


def mean(scores: Scores) -> Mean:
    """Return the mean over models, each of which counts the same."""
    found = scores.values()
    return Mean(sum(score.loss for score in found) / len(found), sum(score.accuracy for score in found) / len(found))


def balance_of(scores: Scores) -> dict[str, float]:
    """Return what the record says beside the mean accuracy over models; nothing where classes are equal for all."""
    found = {}
    for key in ("balanced_accuracy", "majority_share"):
        known = [value for score in scores.values() if (value := getattr(score, key)) is not None]
        if known and len(known) == len(scores):
            found[f"test_{key}"] = sum(known) / len(known)
    return found


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
                if value is not None
            }
            for name in models
        }
    }


def fall(before: float, after: float) -> str:
    """Return a change of a loss in words."""
    changed = f" ({100 * (after / before - 1):+.0f} %)" if math.isfinite(after) and math.isfinite(before) else ""
    return f"{before:.3f} -> {after:.3f}{changed}"
