"""Loss and accuracy over a whole split: every sample counted once for each model, one reduction for all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.data.batches import Batch
from hvfreeze.data.class_shares import majority_of
from hvfreeze.metrics import in_words
from hvfreeze.strategies.base import MODEL, Answers, OpenModel
from hvfreeze.tasks import Classes, Task

CLASSES = Classes(0)


class Score(NamedTuple):
    """Means over samples."""

    loss: float
    accuracy: float
    """0-1."""
    balanced_accuracy: float | None = None
    """The mean over classes of the accuracy on their samples; None where classes are equal, see `class_shares`."""
    majority_share: float | None = None
    """Of the most frequent class among the samples; None where classes are equal."""
    metrics: dict[str, float] | None = None
    """Metrics by which models are compared, by name; None if accuracy and loss decide."""
    decides: float | None = None
    """The metric that decides, signed so that higher is better."""
    thresholds: tuple[float, ...] = ()
    """Thresholds of labels with the best F1 on these held-out samples; see `tasks.MultiLabel`."""

    @property
    def described(self) -> str:
        """The score as text."""
        found = f"accuracy {100 * self.accuracy:.1f} %" if self.metrics is None else in_words(self.metrics)
        return f"{found}, loss {self.loss:.3f}"

    def plain(self) -> dict[str, float]:
        """Return all known numbers by name, as records have them."""
        known = {**self._asdict(), **(self.metrics or {})}
        hidden = ("metrics", "decides", "thresholds")
        return {name: value for name, value in known.items() if value is not None and name not in hidden}

    @property
    def quality(self) -> float:
        """Value by which the best model is kept: higher is better."""
        return self.accuracy if self.decides is None else self.decides

    @property
    def cost(self) -> float:
        """Held-out value by which `auto` compares models, the loss or the negated metric: lower is better."""
        return self.loss if self.decides is None else -self.decides


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
    metrics: dict[str, float] | None = None
    decides: float | None = None
    thresholds: tuple[float, ...] = ()

    def below(self, score: Score) -> bool:
        """Tell whether a score is better: more is right, or with as much right the loss is lower; NaN is highest."""
        ours, theirs = (math.inf if math.isnan(loss) else loss for loss in (self.loss, score.loss))
        best = self.accuracy if self.decides is None else self.decides
        return (score.quality, -theirs) > (best, -ours)


Scores = dict[str, Score]
"""By model."""


@dataclass
class Totals:
    """Sums over samples on this rank; `reduce` turns them into global means."""

    loss: float = 0.0
    weight: float = 0.0
    """Sum of the weights of the samples in `loss`."""
    correct: float = 0
    count: int = 0

    @classmethod
    def read(cls, sums: Mapping[str, Any]) -> Totals:
        """Return the sums of a checkpoint; those of earlier versions divide the loss by the samples."""
        return cls(**{"weight": sums["count"], **sums})

    def add(
        self, logits: Tensor, labels: Tensor, mean_loss: float, *, task: Task = CLASSES, weight: float | None = None
    ) -> None:
        """Add a batch's answers and mean loss, of so much weight; each character of a window counts as one."""
        rows = labels.numel() if task.kind == "classes" else len(labels)
        weight = rows if weight is None else weight
        self.loss += mean_loss * weight
        self.weight += weight
        self.correct += task.right(logits, labels)
        self.count += rows


def count(totals: dict[str, Totals], answers: Mapping[str, Answers], losses: Mapping[str, float], task: Task) -> None:
    """Add a batch's answers and mean losses, by model."""
    for name, (logits, labels) in answers.items():
        totals.setdefault(name, Totals()).add(logits, labels, losses[name], task=task)


def reduce(totals: Mapping[str, Totals], models: Sequence[str], world: World, *, name: str) -> Scores:
    """Return each model's means over the samples that all ranks have counted. Collective."""
    mine = [totals.get(model, Totals()) for model in models]
    sums = torch.tensor([[each.loss, each.weight, each.correct, each.count] for each in mine], dtype=torch.float64)
    rows = world.allreduce_sum(sums, name=f"totals.{name}").tolist()
    return {
        model: Score(loss / max(weight, 1e-9), correct / max(count, 1))
        for model, (loss, weight, correct, count) in zip(models, rows, strict=True)
    }


def evaluate(
    strategy: OpenModel, batches: Sequence[Batch], world: World, task: Task, *, chooses: bool = False
) -> Scores:
    """Return each model's means over a split, of which `batches` are this replica's share. Collective.

    The strategy must have settled. Where several ranks answer for one model on the same samples, no mean changes.
    `chooses` tells whether the split is held out, so that thresholds of labels may be chosen by it.
    """
    totals: dict[str, Totals] = {}
    kept: dict[str, list[Kept]] = {}
    strategy.begin_epoch(batches, training=False)
    for batch in batches:
        said = strategy.predict(batch)
        real = {
            name: Answers(logits[: batch.counted], labels[: batch.counted]) for name, (logits, labels) in said.items()
        }
        losses = {name: float(task.losses(logits.double(), labels).mean()) for name, (logits, labels) in real.items()}
        count(totals, real, losses, task)
        for name, (logits, labels) in real.items():
            # A text's characters are no classes that anybody would balance.
            if labels.dim() == 1 or task.kind != "classes":
                kept.setdefault(name, []).append(Kept(batch.ids[: batch.counted], task, logits, labels))
    scores = reduce(totals, strategy.models, world, name="evaluation")
    return judged(scores, kept, task, world, chooses=chooses)


class Kept:
    """Predictions and labels of some samples, as far as metrics need them."""

    def __init__(self, ids: NDArray[np.int64], task: Task, logits: Tensor, labels: Tensor) -> None:
        self.ids, self.kept, self.labels, self.outputs = ids, task.kept(logits).numpy(), labels.numpy(), logits.shape[1]


def judged(scores: Scores, kept: Mapping[str, Sequence[Kept]], task: Task, world: World, *, chooses: bool) -> Scores:
    """Return the scores with the metrics of all ranks' answers, by model. Collective.

    Rank 0 computes them, of samples in the order of their ids, so that they do not depend on who had which.
    """
    everyone = world.allgather_object({name: list(mine) for name, mine in kept.items()}, name="evaluation.answers")
    found = {}
    for name, score in scores.items() if world.rank == 0 else ():
        parts = [each for theirs in everyone for each in theirs.get(name, ())]
        if parts:
            _, first = np.unique(np.concatenate([each.ids for each in parts]), return_index=True)
            answers, labels = (
                np.concatenate(column)[first] for column in zip(*((each.kept, each.labels) for each in parts))
            )
            found[name] = with_metrics(score, answers, labels, replace(task, outputs=parts[0].outputs), chooses=chooses)
    return scores | world.broadcast_object(found, name="evaluation.metrics")


def with_metrics(
    score: Score, answers: NDArray[Any], labels: NDArray[Any], task: Task, *, chooses: bool = False
) -> Score:
    """Return a score with the metrics that models are compared by, and what is said beside accuracies."""
    if chooses:
        task = task.fitted_to(answers, labels)
    metrics = task.metrics(answers, labels)
    decides = task.decides(metrics)
    score = score._replace(metrics=None if decides is None else metrics, decides=decides, thresholds=task.thresholds)
    score = score._replace(accuracy=metrics.get("accuracy", score.accuracy))
    majority = None if task.kind != "classes" else majority_of(np.bincount(labels, minlength=task.outputs))
    if majority is None:
        return score
    return score._replace(balanced_accuracy=metrics["balanced_accuracy"], majority_share=majority[1])


def mean(scores: Scores) -> Mean:
    """Return the mean over models, each of which counts the same."""
    found = scores.values()
    return Mean(sum(score.loss for score in found) / len(found), sum(score.accuracy for score in found) / len(found))


def beside(scores: Scores) -> dict[str, float]:
    """Return what the record says beside the mean loss and accuracy over models: means of what is known of all."""
    each = [score.plain() for score in scores.values()]
    names = [name for name in (each[0] if each else ()) if name not in ("loss", "accuracy")]
    known = [name for name in names if all(name in one for one in each)]
    return {f"test_{name}": sum(one[name] for one in each) / len(each) for name in known}


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
                for key, value in scores[name].plain().items()
            }
            for name in models
        }
    }


def fall(before: float, after: float) -> str:
    """Return a change of a loss in words."""
    changed = f" ({100 * (after / before - 1):+.0f} %)" if math.isfinite(after) and math.isfinite(before) else ""
    return f"{before:.3f} -> {after:.3f}{changed}"
