"""scikit-learn's metrics by name, from the predictions for all samples.

The import of scikit-learn takes a second, so the metrics of every run on classes are computed here, with equal values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvfreeze.imports import import_whole

Numbers = NDArray[Any]
LOWER_IS_BETTER = ("mae",)
WORDS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "auroc": "AUROC",
    "average_precision": "mean average precision",
    "r2": "R^2",
    "mae": "mean absolute error",
}


def in_words(found: Mapping[str, float]) -> str:
    """Format metrics for a log line."""
    return ", ".join(f"{WORDS[name]} {value:.4g}" for name, value in found.items())


def named_in(line: Mapping[str, Any], *, part: str) -> dict[str, float]:
    """Return the metrics of a part of the samples in a line of metrics.jsonl, such as `test_macro_f1`; NaN for null."""
    known = {name: line[f"{part}_{name}"] for name in WORDS if f"{part}_{name}" in line}
    if f"{part}_r2" in line:
        known.pop("accuracy", None)
    return {name: math.nan if value is None else value for name, value in known.items()}


def balanced_accuracy(counts: ArrayLike, right: ArrayLike) -> float:
    """Return the mean recall over classes; classes without samples do not count.

    `counts` are the samples of each class, `right` the correct predictions among them. NaN if there are no samples.
    """
    samples, hits = np.asarray(counts, dtype=np.float64), np.asarray(right, dtype=np.float64)
    there = samples > 0
    return float((hits[there] / samples[there]).mean()) if there.any() else math.nan


def of_classes(truth: Numbers, found: Numbers) -> dict[str, float]:
    """Return the metrics of (N,) classes and (N,) predictions, which are negative if missing."""
    most = int(max(truth.max(initial=0), found.max(initial=0))) + 1
    parts = (truth, truth[truth == found], found[found >= 0])
    samples, right, answered = (np.bincount(part, minlength=most) for part in parts)
    there = samples + answered > 0
    return {
        "accuracy": float((truth == found).mean()) if len(truth) else math.nan,
        "balanced_accuracy": balanced_accuracy(samples, right),
        "macro_f1": float((2.0 * right[there] / (samples + answered)[there]).mean()) if there.any() else math.nan,
    }


def auroc(truth: Numbers, scores: Numbers) -> float:
    """Return the area under the ROC curve of (N, classes) scores: of the second of two classes, else one against rest.

    The mean is over classes with both positive and negative samples; NaN if there is none.
    """
    is_class = truth[:, None] == np.arange(scores.shape[1])
    if scores.shape[1] == 2:
        is_class, scores = is_class[:, 1:], scores[:, 1:] - scores[:, :1]
    there = is_class.any(0) & ~is_class.all(0)
    return computed(scikit().roc_auc_score, is_class[:, there], scores[:, there])


def of_labels(truth: Numbers, scores: Numbers, found: Numbers) -> dict[str, float]:
    """Return the metrics of (N, labels) of 0 and 1, scores and predictions. Labels without a sample do not count."""
    truth, there = truth.astype(np.int64), truth.any(0)
    right, known = (truth * found).sum(0)[there], (truth.sum(0) + found.sum(0))[there]
    return {
        "average_precision": computed(scikit().average_precision_score, truth[:, there], scores[:, there]),
        # scikit-learn would interpret one label as two classes.
        "macro_f1": float((2.0 * right / known).mean()) if there.any() and np.isfinite(scores).all() else math.nan,
        "accuracy": computed(scikit().accuracy_score, truth, found),
    }


def each_label(truth: Numbers, scores: Numbers, found: Numbers) -> dict[str, float]:
    """Return the counts and metrics of one label, from (N,) labels, scores and predictions."""
    truth = truth.astype(np.int64)
    options: Any = {"average": "binary", "zero_division": 0}
    precision, recall, f1, _ = scikit().precision_recall_fscore_support(truth, found, **options)
    area = computed(scikit().average_precision_score, truth, scores) if truth.any() else math.nan
    counts = {"samples": int(truth.sum()), "given": int(found.sum())}
    return {
        **counts,
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
        "average_precision": area,
    }


def of_numbers(truth: Numbers, found: Numbers) -> dict[str, float]:
    """Return the metrics of (N, outputs) numbers and predictions, averaged over outputs."""
    return {
        "r2": computed(scikit().r2_score, truth, found),
        "mae": computed(scikit().mean_absolute_error, truth, found),
    }


def scikit() -> Any:
    """Return scikit-learn's metrics, imported on demand: that takes longer than an epoch of digits."""
    return import_whole("sklearn.metrics")


def computed(metric: Callable[..., float], truth: Numbers, found: Numbers, **options: Any) -> float:
    """Return a metric of scikit-learn, NaN if there are too few samples or predictions are NaN or Inf."""
    if not truth.size or not np.isfinite(found).all():
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(metric(truth, found, **options))


def best_thresholds(truth: Numbers, chances: Numbers) -> list[float]:
    """Return the threshold with the best F1 of each label, for (N, labels) probabilities; 0.5 without positives."""
    found = []
    for column in range(truth.shape[1]):
        right, said = truth[:, column] > 0.5, chances[:, column]
        best = 0.5
        if right.any() and np.isfinite(said).all():
            precision, recall, edges = scikit().precision_recall_curve(right, said)
            quality = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
            place = int(quality[:-1].argmax())
            # Halfway to the next lower probability: a new sample may be between them.
            best = float(edges[place] + (edges[place - 1] if place else 0.0)) / 2
        found.append(best)
    return found
