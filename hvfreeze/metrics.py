"""How good answers are: scikit-learn's metrics by name, from the answers to all samples.

Its import takes a second, so that what classes alone are judged by is counted here; the numbers are the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    """Return metrics in words."""
    return ", ".join(f"{WORDS[name]} {value:.4g}" for name, value in found.items())


def named_in(line: Mapping[str, Any], *, part: str) -> dict[str, float]:
    """Return the metrics that a line of a record has of a part of the samples, as in `test_macro_f1`; NaN for null."""
    known = {name: line[f"{part}_{name}"] for name in WORDS if f"{part}_{name}" in line}
    if f"{part}_r2" in line:
        known.pop("accuracy", None)
    return {name: math.nan if value is None else value for name, value in known.items()}


def balanced_accuracy(counts: ArrayLike, right: ArrayLike) -> float:
    """Return the mean over classes of which part of their samples is answered right; those without samples count not.

    `counts` are each class's samples, `right` how many of these are. NaN where there are none.
    """
    samples, hits = np.asarray(counts, dtype=np.float64), np.asarray(right, dtype=np.float64)
    there = samples > 0
    return float((hits[there] / samples[there]).mean()) if there.any() else math.nan


def of_classes(truth: Numbers, found: Numbers) -> dict[str, float]:
    """Return what (N,) classes and (N,) answers, negative where there is none, come to."""
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
    """Return the area under the ROC curve of (N, classes) scores: of two classes the second's, else each against all.

    The mean over classes that some samples have and others have not; NaN where there is none.
    """
    from sklearn.metrics import roc_auc_score

    is_class = truth[:, None] == np.arange(scores.shape[1])
    if scores.shape[1] == 2:
        is_class, scores = is_class[:, 1:], scores[:, 1:] - scores[:, :1]
    there = is_class.any(0) & ~is_class.all(0)
    return computed(roc_auc_score, is_class[:, there], scores[:, there])


def of_labels(truth: Numbers, scores: Numbers, found: Numbers) -> dict[str, float]:
    """Return what (N, labels) of 0 and 1, scores, and given labels come to; those that no sample has do not count."""
    from sklearn.metrics import accuracy_score, average_precision_score, f1_score

    truth, there = truth.astype(np.int64), truth.any(0)
    return {
        "average_precision": computed(average_precision_score, truth[:, there], scores[:, there]),
        "macro_f1": computed(f1_score, truth[:, there], found[:, there], average="macro", zero_division=0),
        "accuracy": computed(accuracy_score, truth, found),
    }


def each_label(truth: Numbers, scores: Numbers, found: Numbers) -> dict[str, float]:
    """Return what the answers for one label come to, (N,) each: how many have it and are given it, and how rightly."""
    from sklearn.metrics import average_precision_score, precision_recall_fscore_support

    truth = truth.astype(np.int64)
    options: Any = {"average": "binary", "zero_division": 0}
    precision, recall, f1, _ = precision_recall_fscore_support(truth, found, **options)
    area = computed(average_precision_score, truth, scores) if truth.any() else math.nan
    counts = {"samples": int(truth.sum()), "given": int(found.sum())}
    return {
        **counts,
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
        "average_precision": area,
    }


def of_numbers(truth: Numbers, found: Numbers) -> dict[str, float]:
    """Return what (N, outputs) numbers and answers come to: the means over outputs."""
    from sklearn.metrics import mean_absolute_error, r2_score

    return {"r2": computed(r2_score, truth, found), "mae": computed(mean_absolute_error, truth, found)}


def computed(metric: Callable[..., float], truth: Numbers, found: Numbers, **options: Any) -> float:
    """Return one of scikit-learn's metrics, NaN where samples do not suffice or answers are not finite."""
    if not truth.size or not np.isfinite(found).all():
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(metric(truth, found, **options))


def best_thresholds(truth: Numbers, chances: Numbers) -> list[float]:
    """Return for each label the probability above which to give it, by the best F1 of (N, labels); 0.5 without any."""
    from sklearn.metrics import precision_recall_curve

    found = []
    for column in range(truth.shape[1]):
        right, said = truth[:, column] > 0.5, chances[:, column]
        best = 0.5
        if right.any() and np.isfinite(said).all():
            precision, recall, edges = precision_recall_curve(right, said)
            quality = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
            place = int(quality[:-1].argmax())
            # Halfway to the next lower probability: a new sample may lie between them.
            best = float(edges[place] + (edges[place - 1] if place else 0.0)) / 2
        found.append(best)
    return found
