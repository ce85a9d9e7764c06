"""Tasks: one class, several labels, or numbers per sample. Losses, metrics, targets and calibration of fitted heads.

Ridge regression fits each output to a target. Held-out answers then choose the calibration: `scale` x answer + `bias`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hvfreeze.metrics import (
    LOWER_IS_BETTER,
    WORDS,
    auroc,
    best_thresholds,
    each_label,
    of_classes,
    of_labels,
    of_numbers,
)

Samples = Tensor | NDArray[np.int64]
"""Sample ids, (N,) int64."""


class Calibration(NamedTuple):
    """Scale and bias that map raw outputs to logits or predictions."""

    scale: Tensor
    """Scale of each output, (outputs,) float64."""
    bias: Tensor
    """Bias of each output, (outputs,) float64."""

    def apply(self, answers: Tensor) -> Tensor:
        """Return the logits, (N, outputs), of raw answers."""
        return answers * self.scale.to(answers.dtype) + self.bias.to(answers.dtype)


@dataclass(frozen=True)
class Task(ABC):
    """A kind of labels, and the number of outputs of a head for them."""

    outputs: int
    metric: str = ""
    """Metric that compares models, a key of `metrics.WORDS`; empty means `usual_metric`, else accuracy and loss."""
    thresholds: tuple[float, ...] = ()
    """Probability above which each label is predicted, for `MultiLabel`; empty means 0.5."""
    sample_weights: Tensor | None = field(default=None, compare=False, repr=False)
    """Weight of each training sample in the loss, (samples,) float32, with mean 1; None means equal weights."""
    kind: ClassVar[str]
    """The key in `TASKS`."""
    usual_metric: ClassVar[str] = ""
    """Default of `metric`."""
    nouns: ClassVar[tuple[str, str]]
    """Noun for one output, and for several."""

    @abstractmethod
    def kept(self, logits: Tensor) -> Tensor:
        """Return the part of (B, outputs) logits that `metrics` needs, (B, ...). It is gathered from all ranks."""

    @abstractmethod
    def metrics(self, kept: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
        """Return the metrics of predictions, by name."""

    def answered(self, logits: Tensor) -> bool:
        """Return True if a sample's (outputs,) logits hold no NaN or Inf."""
        return bool(logits.isfinite().all())

    @abstractmethod
    def columns(self, logits: Tensor, names: Sequence[str], *, top: int) -> dict[str, Any]:
        """Return the prediction for a sample's (outputs,) logits as columns of a table; empty cells for NaN or Inf."""

    @abstractmethod
    def right(self, logits: Tensor, labels: Tensor) -> float:
        """Return the number of correct predictions, NaN for numbers."""

    @property
    def is_examined(self) -> bool:
        """Whether models are compared by a metric, not by loss and accuracy alone."""
        return bool(self.metric or self.usual_metric)

    def fitted_to(self, kept: NDArray[Any], labels: NDArray[Any]) -> Task:
        """Return the task with thresholds chosen on held-out predictions."""
        return self

    def examined(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float] | None, tuple[float, ...]]:
        """Return the metrics of held-out predictions, None if loss and accuracy decide, and the thresholds."""
        if not self.is_examined:
            return None, ()
        kept, truth = self.kept(logits).numpy(), labels.numpy()
        task = self.fitted_to(kept, truth)
        return task.metrics(kept, truth), task.thresholds

    def from_units(self, labels: Tensor) -> Tensor:
        """Convert labels in the user's units to the task's form."""
        return labels

    def by_output(self, kept: NDArray[Any], labels: NDArray[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return a table row with the metrics of each output, for several labels or numbers."""
        return []

    @property
    def decisive(self) -> tuple[str, bool]:
        """Name of the number that compares models in `hvfreeze auto`, for messages, and whether lower is better."""
        name = self.metric or self.usual_metric
        return (WORDS[name], name in LOWER_IS_BETTER) if name else ("loss", True)

    def decides(self, found: Mapping[str, float]) -> float | None:
        """Return the value of `metric`, signed so that higher is better; None if loss and accuracy decide."""
        name = self.metric or self.usual_metric
        if name not in found:
            return None
        value = found[name]
        return -math.inf if math.isnan(value) else -value if name in LOWER_IS_BETTER else value

    @property
    def num_strata(self) -> int:
        """Largest number of strata."""
        return self.outputs

    @abstractmethod
    def strata(self, labels: Tensor) -> Tensor:
        """Return the stratum of each row for stratified sharding, (N,) int64 in 0..`num_strata` - 1."""

    @abstractmethod
    def present(self, labels: Tensor) -> Tensor:
        """Return (outputs,) bool: True for classes and labels that occur, and for every number."""

    @abstractmethod
    def training_losses(self, logits: Tensor, labels: Tensor, *, smoothing: float) -> Tensor:
        """Return the training loss of each row, (N,), without weights."""

    def training_loss(self, logits: Tensor, labels: Tensor, samples: Samples, *, smoothing: float = 0.0) -> Tensor:
        """Return the mean over rows of weight times loss; the weights' mean over all training samples is 1."""
        return self.weighted_losses(logits, labels, samples, smoothing=smoothing).mean()

    def weighted_losses(self, logits: Tensor, labels: Tensor, samples: Samples, *, smoothing: float = 0.0) -> Tensor:
        """Return the training loss of each row times its weight in training, (N,)."""
        weights = self.weights_of(labels, samples, training=True)
        return self.training_losses(logits, labels, smoothing=smoothing) * weights

    def defer_weights(self, deferred: bool) -> None:
        """Choose whether all classes weigh 1 in the training loss from now on; other tasks have no class weights."""
        return

    @property
    def defers_weights(self) -> bool:
        """Whether there are class weights that do not count in the training loss yet."""
        return False

    def weights_of(self, labels: Tensor, samples: Samples, *, training: bool = False) -> Tensor:
        """Return the weight of each row in the loss, (N,) float32: that of its class times that of its sample.

        With `training`, deferred class weights are 1. Sample weights are never deferred: they say how far a label is
        trusted, or how often a sample occurs, which holds for features too. On digits with 60 % random labels of
        weight 0.1, accuracy is 96.0 % so, 93.8 % if only the last fifth of the steps has weights, and 91.4 % without
        (3 seeds).
        """
        weights = self.class_weights_of(labels, training=training)
        return weights if self.sample_weights is None else weights * self.sample_weights[torch.as_tensor(samples)]

    def class_weights_of(self, labels: Tensor, *, training: bool) -> Tensor:
        """Return the weight of each row's class; see `weights_of`."""
        return torch.ones(labels.shape[:1])

    @property
    @abstractmethod
    def no_labels(self) -> Tensor:
        """An empty tensor of labels."""

    @abstractmethod
    def targets(self, labels: Tensor) -> Tensor:
        """Return the targets of ridge regression, (N, outputs) float64."""

    @abstractmethod
    def calibrate(self, answers: Tensor, labels: Tensor, weights: Tensor, *, samples: int) -> Calibration:
        """Return the calibration of raw answers, (N, outputs), with the least loss; `samples` chose it."""

    @abstractmethod
    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row, (N,)."""

    @abstractmethod
    def score(self, logits: Tensor, labels: Tensor) -> float:
        """Return the quality of the predictions, at most 1; NaN without rows."""

    def measured(self, labels: Tensor, weights: Tensor) -> Task:
        """Return the task with the scale of the targets from all ranks' labels and their weights."""
        return self

    def smoothed_loss(self, logits: Tensor, labels: Tensor, weights: Tensor, *, samples: int) -> float:
        """Return the weighted mean loss for choosing a penalty with `samples` samples."""
        return self.loss(logits, labels, weights)

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor) -> float:
        """Return the weighted mean loss; NaN without rows."""
        return float((self.losses(logits, labels) * weights).sum() / weights.sum())


def doubt(samples: int) -> float:
    """Return the label smoothing for a head that is calibrated on `samples` samples.

    This is Laplace's rule of succession: one more correct and one more wrong prediction. Without it, a few samples that
    are all correct would choose an infinite scale.
    """
    return 1 / (samples + 2)


SCALES = tuple(10 ** (part / 20) for part in range(-20, 41))
"""Scales from 0.1 to 100 in steps of 12 %, which change a loss near its minimum by less than 1 %."""

PARTS = tuple(part / 10 for part in range(11))
"""Candidate parts of the logarithms of class weights in the bias of a fitted head."""


@dataclass
class Reweighting:
    """Whether class weights count in the training loss now.

    Deferred re-weighting (Cao et al., NeurIPS 2019, arXiv 1906.07413): features are learned from all samples alike,
    and only the last steps weight classes. From the start, the few samples of a rare class would dominate batches.
    """

    is_on: bool = True


@dataclass(frozen=True)
class Classes(Task):
    """One class per row; labels are (N,) int64. For windows of text (N, T), with logits (N, classes, T)."""

    weights: tuple[float, ...] = ()
    """Weight of each class in the loss, with mean 1 over training rows; empty means equal weights."""
    reweighting: Reweighting = field(default_factory=Reweighting, compare=False)
    kind: ClassVar[str] = "classes"
    nouns: ClassVar[tuple[str, str]] = ("class", "classes")

    def kept(self, logits: Tensor) -> Tensor:
        """Return the most probable classes, or the logits if metrics need scores."""
        return logits if self.metric == "auroc" else classes_of(logits)

    def answered(self, logits: Tensor) -> bool:
        """Return True if the largest logit is not NaN or Inf."""
        return int(classes_of(logits[None])) != NO_ANSWER

    def columns(self, logits: Tensor, names: Sequence[str], *, top: int) -> dict[str, Any]:
        """Return the most probable classes with probabilities; ties go to the first class, as in an evaluation."""
        answered = self.answered(logits)
        probabilities = logits.double().softmax(0)
        found: dict[str, Any] = {}
        for place, index in enumerate(logits.argsort(descending=True, stable=True)[:top].tolist(), 1):
            suffix = f"_{place}" if place > 1 else ""
            found[f"class{suffix}"] = names[index] if answered else ""
            found[f"probability{suffix}"] = round(float(probabilities[index]), 6) if answered else ""
        return found

    def right(self, logits: Tensor, labels: Tensor) -> float:
        """Return the number of correct rows, or of correct characters."""
        return int((classes_of(logits) == labels).sum())

    def metrics(self, kept: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
        """Return accuracy, balanced accuracy and macro F1, and for logits the area under the ROC curve."""
        found = kept if kept.ndim == 1 else classes_of(torch.from_numpy(kept)).numpy()
        return of_classes(labels, found) | ({} if kept.ndim == 1 else {"auroc": auroc(labels, kept)})

    def strata(self, labels: Tensor) -> Tensor:
        """Return the classes."""
        return labels

    def present(self, labels: Tensor) -> Tensor:
        """Return a mask of the classes that occur."""
        return torch.bincount(labels.flatten(), minlength=self.outputs) > 0

    def defer_weights(self, deferred: bool) -> None:
        """Choose whether all classes have the weight 1 in the training loss from now on."""
        self.reweighting.is_on = not deferred

    @property
    def defers_weights(self) -> bool:
        """Whether there are class weights that do not count in the training loss yet."""
        return bool(self.weights) and not self.reweighting.is_on

    def class_weights_of(self, labels: Tensor, *, training: bool) -> Tensor:
        """Return the weights of the rows' classes."""
        is_one = not self.weights or (training and self.defers_weights)
        return torch.ones(labels.shape) if is_one else torch.tensor(self.weights)[labels]

    def training_losses(self, logits: Tensor, labels: Tensor, *, smoothing: float) -> Tensor:
        """Return the cross-entropies."""
        return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)

    def training_loss(self, logits: Tensor, labels: Tensor, samples: Samples, *, smoothing: float = 0.0) -> Tensor:
        """Return the weighted mean loss; with equal weights PyTorch's mean."""
        if self.weights or self.sample_weights is not None:
            return super().training_loss(logits, labels, samples, smoothing=smoothing)
        return functional.cross_entropy(logits, labels, label_smoothing=smoothing)

    @property
    def no_labels(self) -> Tensor:
        """Return an empty tensor of labels."""
        return torch.zeros(0, dtype=torch.int64)

    def targets(self, labels: Tensor) -> Tensor:
        """Return 1 - 1 / C for the row's class, -1 / C for the others."""
        return functional.one_hot(labels, self.outputs).double() - 1 / self.outputs

    def calibrate(self, answers: Tensor, labels: Tensor, weights: Tensor, *, samples: int) -> Calibration:
        """Return the scale of `SCALES` and, with class weights, the bias with the least cross-entropy.

        The best logits for weighted classes are those for equal weights plus the logarithms of the weights (Menon et
        al., ICLR 2021, arXiv 2007.07314). A fit with weighted rows already includes a part of them: the bias has
        another part, one of `PARTS`.
        """
        class_weights = torch.tensor(self.weights or [1.0] * self.outputs, dtype=torch.float64)
        # A weight may underflow to 0.
        logarithms = class_weights.clamp(min=torch.finfo(torch.float32).tiny).log()

        @cache
        def loss(place: int, part: float) -> float:
            logits = SCALES[place] * answers + part * logarithms
            return self.smoothed_loss(logits, labels, weights, samples=samples)

        def scaled(part: float) -> tuple[float, int]:
            # The cross-entropy is convex in the scale: it falls up to the best one and then rises.
            places = range(len(SCALES) - 1)
            best = bisect_left(places, True, key=lambda place: loss(place, part) <= loss(place + 1, part))
            return loss(best, part), best

        (_, place), part = min((scaled(part), part) for part in (PARTS if self.weights else (0.0,)))
        return Calibration(torch.full((self.outputs,), SCALES[place], dtype=torch.float64), part * logarithms)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropies."""
        return functional.cross_entropy(logits, labels, reduction="none")

    def score(self, logits: Tensor, labels: Tensor) -> float:
        """Return the accuracy."""
        return float((logits.argmax(1) == labels).double().mean())

    def smoothed_loss(self, logits: Tensor, labels: Tensor, weights: Tensor, *, samples: int) -> float:
        """Return the cross-entropy with the label smoothing of `doubt`."""
        # torch spreads the smoothed part over all classes, including the right one.
        spread = min(1.0, doubt(samples) * self.outputs / max(1, self.outputs - 1))
        losses = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=spread)
        return float((losses * weights).sum() / weights.sum())


class MultiLabel(Task):
    """Any number of labels per row; labels are (N, outputs) of 0 and 1, in float32. The loss is the sum over labels."""

    kind: ClassVar[str] = "labels"
    nouns: ClassVar[tuple[str, str]] = ("label", "labels")
    usual_metric: ClassVar[str] = "average_precision"

    def kept(self, logits: Tensor) -> Tensor:
        """Return the logits."""
        return logits

    def metrics(self, kept: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
        """Return mean average precision, macro F1 and the share of rows with all labels correct."""
        return of_labels(labels, kept, self.given(torch.from_numpy(kept)).numpy())

    def columns(self, logits: Tensor, names: Sequence[str], *, top: int) -> dict[str, Any]:
        """Return the predicted labels, the most probable first, with their probabilities."""
        if not self.answered(logits):
            return {"labels": "", "probabilities": ""}
        chances, given = logits.double().sigmoid(), self.given(logits)
        chosen = [place for place in chances.argsort(descending=True, stable=True).tolist() if given[place]]
        return {
            "labels": ",".join(names[place] for place in chosen),
            "probabilities": ",".join(f"{float(chances[place]):.6g}" for place in chosen),
        }

    def right(self, logits: Tensor, labels: Tensor) -> float:
        """Return the number of rows with all labels correct."""
        return int((self.given(logits) == (labels > 0.5)).all(1).sum())

    def by_output(self, kept: NDArray[Any], labels: NDArray[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the samples, predictions, metrics and threshold of each label."""
        given = self.given(torch.from_numpy(kept)).numpy()
        return [
            {"label": name, **each_label(labels[:, place], kept[:, place], given[:, place]), "threshold": threshold}
            for place, (name, threshold) in enumerate(zip(names, self.thresholds or [0.5] * len(names), strict=True))
        ]

    def fitted_to(self, kept: NDArray[Any], labels: NDArray[Any]) -> MultiLabel:
        """Return the task with the threshold of the best F1 for each label."""
        return replace(self, thresholds=tuple(best_thresholds(labels, 1 / (1 + np.exp(-kept.astype(np.float64))))))

    def given(self, logits: Tensor) -> Tensor:
        """Return a mask of the predicted labels, (B, outputs) bool."""
        return logits.double().sigmoid() > torch.tensor(self.thresholds or [0.5]).double()

    @property
    def num_strata(self) -> int:
        """Number of labels, plus one for rows without labels."""
        return self.outputs + 1

    def strata(self, labels: Tensor) -> Tensor:
        """Return the index of each row's rarest label, `outputs` for rows without labels."""
        counts = labels.sum(0)
        rarest = torch.where(labels > 0.5, counts, float("inf")).argmin(1)
        return torch.where(labels.sum(1) > 0, rarest, self.outputs)

    def present(self, labels: Tensor) -> Tensor:
        """Return a mask of the labels that occur."""
        return (labels > 0.5).any(0)

    def training_losses(self, logits: Tensor, labels: Tensor, *, smoothing: float) -> Tensor:
        """Return the binary cross-entropies."""
        wanted = labels * (1 - smoothing) + smoothing / 2
        return functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(1)

    @property
    def no_labels(self) -> Tensor:
        """Return an empty tensor of labels, with `outputs` columns."""
        return torch.zeros(0, self.outputs)

    def targets(self, labels: Tensor) -> Tensor:
        """Return 1 for a label of the row, -1 for the others."""
        return 2 * labels.double() - 1

    def calibrate(self, answers: Tensor, labels: Tensor, weights: Tensor, *, samples: int) -> Calibration:
        """Fit a logistic regression of each label on its raw output (Platt, 1999), by Newton's method."""
        inputs, weight = torch.stack([answers, torch.ones_like(answers)]), weights[:, None] / weights.sum()
        spread = doubt(samples)
        wanted = labels.double() * (1 - 2 * spread) + spread
        found = torch.zeros(2, self.outputs, dtype=torch.float64)
        # It converges within 10.
        for _ in range(20):
            said = (found[:, None] * inputs).sum(0).sigmoid()
            slope = ((said - wanted) * weight * inputs).sum(1)
            bend = torch.einsum("int,jnt->tij", inputs * (said * (1 - said) * weight), inputs)
            bend.diagonal(dim1=1, dim2=2).add_(1e-6)
            found = found - torch.linalg.solve(bend, slope.t()).t()
        return Calibration(found[0], found[1])

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross-entropies."""
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").sum(1)

    def score(self, logits: Tensor, labels: Tensor) -> float:
        """Return the share of labels that are correct at probability 0.5."""
        return float(((logits > 0) == (labels > 0.5)).double().mean())


@dataclass(frozen=True)
class Numbers(Task):
    """Regression; labels are (N, outputs) float32, or float64."""

    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    """Standard deviation of each output over all rows. `mean` and `deviation` are 0 and 1 before `measured`."""
    offset: tuple[float, ...] = ()
    unit: tuple[float, ...] = ()
    """Scale of a run's standardized labels: user units are `offset` + `unit` x; empty means 0 and 1."""
    huber: bool = True
    """Whether training minimizes the Huber loss, whose gradients are bounded like those of cross-entropy."""
    kind: ClassVar[str] = "numbers"
    nouns: ClassVar[tuple[str, str]] = ("number", "numbers")
    usual_metric: ClassVar[str] = "r2"

    def kept(self, logits: Tensor) -> Tensor:
        """Return the predictions."""
        return logits

    def metrics(self, kept: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
        """Return R^2 and the mean absolute error in the user's units, averaged over outputs."""
        return of_numbers(self.in_units(labels), self.in_units(kept))

    def standardised(self, labels: Tensor, chosen: Tensor) -> tuple[Numbers, Tensor]:
        """Return the task and all labels, standardized by the mean and deviation of the rows `chosen`."""
        rows = labels[chosen]
        known = self.measured(rows, torch.ones(len(rows)))
        task = replace(self, offset=known.mean, unit=known.deviation)
        return task, task.from_units(labels)

    def from_units(self, labels: Tensor) -> Tensor:
        """Convert numbers in the user's units to the run's, float32."""
        offset, unit = (torch.tensor(each, dtype=torch.float64) for each in (self.offset or [0.0], self.unit or [1.0]))
        return ((labels.double() - offset) / unit).float()

    def by_output(self, kept: NDArray[Any], labels: NDArray[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the metrics of each number, with the mean and the deviation of its true values."""
        truth, found = self.in_units(labels), self.in_units(kept)
        return [
            {
                "number": name,
                **of_numbers(truth[:, place : place + 1], found[:, place : place + 1]),
                "mean": float(truth[:, place].mean()),
                "deviation": float(truth[:, place].std()),
            }
            for place, name in enumerate(names)
        ]

    def in_units(self, answers: NDArray[Any]) -> NDArray[Any]:
        """Convert predictions to the user's units, float64."""
        found: NDArray[Any] = np.array(self.unit or 1.0) * answers.astype(np.float64) + np.array(self.offset or 0.0)
        return found

    def columns(self, logits: Tensor, names: Sequence[str], *, top: int) -> dict[str, Any]:
        """Return each number in its own column, with six digits of its deviation."""
        answered, size = self.answered(logits), len(names)
        scale = zip(self.offset or (0.0,) * size, self.unit or (1.0,) * size, strict=True)
        digits = [6 + max(0, math.ceil(math.log10(abs(offset / unit) or 1.0))) for offset, unit in scale]
        return {
            name: float(f"{value:.{count}g}") if answered else ""
            for name, value, count in zip(names, self.in_units(logits.numpy()).tolist(), digits, strict=True)
        }

    def right(self, logits: Tensor, labels: Tensor) -> float:
        """Return NaN."""
        return math.nan

    @property
    def num_strata(self) -> int:
        """Ten strata, one per decile."""
        return 10

    def strata(self, labels: Tensor) -> Tensor:
        """Return the decile of each row's first number; equal numbers have the same one."""
        first = labels[:, 0].contiguous()
        return torch.bucketize(first, first.double().quantile(torch.arange(1, 10).double() / 10).to(first.dtype))

    def present(self, labels: Tensor) -> Tensor:
        """Return True for every number."""
        return torch.ones(self.outputs, dtype=torch.bool)

    def training_losses(self, logits: Tensor, labels: Tensor, *, smoothing: float) -> Tensor:
        """Return half the squared errors, or the Huber losses, averaged over outputs."""
        if self.huber:
            return functional.huber_loss(logits, labels, reduction="none").mean(1)
        return (logits - labels).square().mean(1) / 2

    @property
    def no_labels(self) -> Tensor:
        """Return an empty tensor of labels, with `outputs` columns."""
        return torch.zeros(0, self.outputs)

    def measured(self, labels: Tensor, weights: Tensor) -> Numbers:
        """Return the task with the labels' weighted mean and deviation."""
        # Relative to the first row: equal labels have the deviation 0, without rounding.
        first, weights = labels[:1].double(), weights.double()[:, None]
        moved = labels.double() - first
        mean = (moved * weights).sum(0) / weights.sum()
        deviation = (((moved - mean).square() * weights).sum(0) / weights.sum()).sqrt()
        deviation = torch.where(deviation > 0, deviation, 1.0)
        return replace(self, mean=tuple((first[0] + mean).tolist()), deviation=tuple(deviation.tolist()))

    def targets(self, labels: Tensor) -> Tensor:
        """Return standardised labels."""
        mean, deviation = self.scale()
        return (labels.double() - mean) / deviation

    def calibrate(self, answers: Tensor, labels: Tensor, weights: Tensor, *, samples: int) -> Calibration:
        """Return the calibration that undoes the standardisation."""
        mean, deviation = self.scale()
        return Calibration(deviation, mean)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the squared errors, as shares of the outputs' variances."""
        return ((logits - labels) / self.scale()[1].to(logits.dtype)).square().mean(1)

    def score(self, logits: Tensor, labels: Tensor) -> float:
        """Return R^2, the mean over outputs."""
        labels = labels.double()
        left, whole = (logits - labels).square().sum(0), (labels - labels.mean(0)).square().sum(0)
        return float((1 - left / whole).mean())

    def scale(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the deviation, (outputs,) float64 each."""
        mean, deviation = self.mean or (0.0,), self.deviation or (1.0,)
        return torch.tensor(mean, dtype=torch.float64), torch.tensor(deviation, dtype=torch.float64)


NO_ANSWER = -2
"""Placeholder for a class if the model's output overflows."""


def classes_of(logits: Tensor) -> Tensor:
    """Return the most probable class of (B, classes, ...) logits, (B, ...) int64; NO_ANSWER if its logit is NaN or Inf.

    torch's argmax would return the first class for NaN, and count it as correct for samples of that class.
    """
    return logits.argmax(1).masked_fill(~logits.amax(1).isfinite(), NO_ANSWER)


TASKS: dict[str, type[Task]] = {kind.kind: kind for kind in (Classes, MultiLabel, Numbers)}
"""Tasks by the kind of their labels."""
