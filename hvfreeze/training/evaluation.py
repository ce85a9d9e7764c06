"""Evaluate models on a whole split: each sample counts once per model, with one reduction for all models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.comm.agreement import gather_objects
from hvfreeze.comm.world import World
from hvfreeze.data.batches import Batch
from hvfreeze.data.class_shares import majority_of
from hvfreeze.metrics import in_words
from hvfreeze.strategies.base import MODEL, Answers, OpenModel
from hvfreeze.tasks import Classes, Task

CLASSES = Classes(0)


class Score(NamedTuple):
    """A model's loss, accuracy and metrics, as means over samples."""

    loss: float
    accuracy: float
    """Accuracy, 0-1."""
    balanced_accuracy: float | None = None
    """Mean recall of all classes, 0-1; None if classes are balanced, see `class_shares`."""
    majority_share: float | None = None
    """Share of the most frequent class, 0-1; None if classes are balanced."""
    metrics: dict[str, float] | None = None
    """Metrics for comparing models, by name; None if accuracy and loss decide."""
    decides: float | None = None
    """The metric that decides, signed so that higher is better."""
    thresholds: tuple[float, ...] = ()
    """Label thresholds with the best F1 on these held-out samples; see `tasks.MultiLabel`."""

    @property
    def described(self) -> str:
        """The score as text; the number that decides comes first."""
        loss = f"loss {self.loss:.3f}"
        if not math.isfinite(self.loss):
            return "loss not usable (NaN, Inf or a fit that did not converge)"
        if self.metrics is None:
            return f"{loss}, accuracy {100 * self.accuracy:.1f} %"
        return f"{in_words(self.metrics)}, {loss}"

    def plain(self) -> dict[str, float]:
        """Return the known numbers by name, as in metrics.jsonl."""
        known = {**self._asdict(), **(self.metrics or {})}
        hidden = ("metrics", "decides", "thresholds")
        return {name: value for name, value in known.items() if value is not None and name not in hidden}

    @property
    def quality(self) -> float:
        """Value for choosing the best model; higher is better."""
        return self.accuracy if self.decides is None else self.decides

    @property
    def cost(self) -> tuple[float, float]:
        """Values for comparing models in `auto`: negated metric, then loss (NaN as Inf). Lower is better."""
        loss = math.inf if math.isnan(self.loss) else self.loss
        return loss if self.decides is None else -self.decides, loss


class Mean(NamedTuple):
    """Loss and accuracy as means over models."""

    loss: float
    accuracy: float
    """Accuracy, 0-1."""


class Best(NamedTuple):
    """A model's best evaluation so far."""

    epoch: int
    step: int
    accuracy: float
    loss: float
    parameter_digest: str
    """Digest of all models' parameters if this one is saved, else empty."""
    balanced_accuracy: float | None = None
    majority_share: float | None = None
    metrics: dict[str, float] | None = None
    decides: float | None = None
    thresholds: tuple[float, ...] = ()

    def below(self, score: Score) -> bool:
        """Return True if a score is better: higher accuracy, or equal accuracy and lower loss (NaN counts as Inf)."""
        ours, theirs = (math.inf if math.isnan(loss) else loss for loss in (self.loss, score.loss))
        best = self.accuracy if self.decides is None else self.decides
        return (score.quality, -theirs) > (best, -ours)


Scores = dict[str, Score]
"""Scores by model."""


@dataclass
class Totals:
    """Sums over this rank's samples; `reduce` turns them into global means."""

    loss: float = 0.0
    weight: float = 0.0
    """Sum of the weights of the samples in `loss`."""
    correct: float = 0
    count: int = 0

    @classmethod
    def read(cls, sums: Mapping[str, Any]) -> Totals:
        """Return the sums of a checkpoint. Earlier versions divided the loss by the number of samples."""
        return cls(**{"weight": sums["count"], **sums})

    def add(
        self, logits: Tensor, labels: Tensor, mean_loss: float, *, task: Task = CLASSES, weight: float | None = None
    ) -> None:
        """Add a batch's predictions and its mean loss of the given weight; each character of a window counts once."""
        rows = labels.numel() if task.kind == "classes" else len(labels)
        weight = rows if weight is None else weight
        self.loss += mean_loss * weight
        self.weight += weight
        self.correct += task.right(logits, labels)
        self.count += rows


def count(totals: dict[str, Totals], answers: Mapping[str, Answers], losses: Mapping[str, float], task: Task) -> None:
    """Add a batch's predictions and mean losses, by model."""
    for name, (logits, labels) in answers.items():
        totals.setdefault(name, Totals()).add(logits, labels, losses[name], task=task)


def reduce(totals: Mapping[str, Totals], models: Sequence[str], world: World, *, name: str) -> Scores:
    """Return each model's means over all ranks' samples. Collective."""
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
    """Evaluate each model on a split and return its means; `batches` are this replica's share. Collective.

    The strategy must be synchronized. Several ranks may evaluate one model on the same samples without changing means.
    `chooses` is True for held-out splits, which may choose thresholds of labels.
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
            # The characters of a text are not balanced like classes.
            if labels.dim() == 1 or task.kind != "classes":
                kept.setdefault(name, []).append(Kept(batch.ids[: batch.counted], task, logits, labels))
    scores = reduce(totals, strategy.models, world, name="evaluation")
    return add_metrics(scores, kept, task, world, chooses=chooses)


class Kept:
    """Predictions and labels of samples, for metrics."""

    def __init__(self, ids: NDArray[np.int64], task: Task, logits: Tensor, labels: Tensor) -> None:
        self.ids, self.kept, self.labels, self.outputs = ids, task.kept(logits).numpy(), labels.numpy(), logits.shape[1]


def add_metrics(
    scores: Scores, kept: Mapping[str, Sequence[Kept]], task: Task, world: World, *, chooses: bool
) -> Scores:
    """Return the scores with the metrics of all ranks' predictions, by model. Collective.

    Rank 0 computes them with samples in the order of their ids, so they do not depend on the sharding.
    """
    local = {name: list(mine) for name, mine in kept.items()}
    everyone = gather_objects(world, local, name="evaluation.answers")
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
    """Return a score with balanced accuracy, majority share and the task's metrics."""
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
    """Return the unweighted mean over models."""
    found = scores.values()
    return Mean(sum(score.loss for score in found) / len(found), sum(score.accuracy for score in found) / len(found))


def other_numbers(scores: Scores) -> dict[str, float]:
    """Return the record's other numbers: means over models, if all models have them."""
    each = [score.plain() for score in scores.values()]
    names = [name for name in (each[0] if each else ()) if name not in ("loss", "accuracy")]
    known = [name for name in names if all(name in one for one in each)]
    return {f"test_{name}": sum(one[name] for one in each) / len(each) for name in known}


def by_model(models: Sequence[str], **parts: Scores) -> dict[str, Any]:
    """Return the entry `models` of a line of the record; empty for a single model."""
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


def fall(before: float, after: float, needed: float) -> str:
    """Format a change of a loss that must fall by the share `needed`, e.g. 0.05, for log lines."""
    if not (math.isfinite(before) and math.isfinite(after)):
        return f"{before:.3f} -> NaN or Inf"
    return f"{before:.3f} -> {after:.3f} ({100 * (after / before - 1):+.0f} %; fine-tuning needs {-100 * needed:.0f} %)"
