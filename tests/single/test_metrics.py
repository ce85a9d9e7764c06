"""Metrics equal scikit-learn's, also if hvfreeze computes them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from hvfreeze.metrics import best_thresholds
from hvfreeze.tasks import NO_ANSWER, Classes, MultiLabel, Numbers

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(97, 5)).astype(np.float32)


@pytest.mark.parametrize("classes", [[0, 1, 2, 3, 4], [0, 1, 3], [0, 0, 0, 1, 4]])
def test_those_of_classes(classes: list[int]) -> None:
    labels = RNG.choice(classes, 97)
    found = Classes(5, metric="auroc").metrics(LOGITS, labels)
    said = LOGITS.argmax(1)
    assert found["accuracy"] == reference.accuracy_score(labels, said)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found["balanced_accuracy"] == reference.balanced_accuracy_score(labels, said)
    assert found["macro_f1"] == reference.f1_score(labels, said, average="macro", zero_division=0)
    if len(set(classes)) == 5:
        chances = torch.from_numpy(LOGITS).double().softmax(1).numpy()
        several = [reference.roc_auc_score(labels == place, LOGITS[:, place]) for place in range(5)]
        assert found["auroc"] == pytest.approx(np.mean(several), abs=1e-15)
        assert found["auroc"] == pytest.approx(
            reference.roc_auc_score(labels, chances, multi_class="ovr", average="macro"), abs=0.02
        )
    assert Classes(5).metrics(said, labels) == {name: found[name] for name in found if name != "auroc"}


def test_two_classes_have_the_curve_of_the_second() -> None:
    labels = RNG.integers(0, 2, 97)
    found = Classes(2, metric="auroc").metrics(LOGITS[:, :2], labels)
    chances = torch.from_numpy(LOGITS[:, :2]).double().softmax(1).numpy()
    assert found["auroc"] == pytest.approx(reference.roc_auc_score(labels, chances[:, 1]), abs=1e-12)


def test_those_of_labels() -> None:
    labels = (RNG.random((97, 5)) < 0.3).astype(np.float32)
    alone = MultiLabel(1).metrics(LOGITS[:, :1], labels[:, :1])
    assert alone["macro_f1"] == reference.f1_score(labels[:, 0], LOGITS[:, 0] > 0)
    assert alone["average_precision"] == reference.average_precision_score(labels[:, 0], LOGITS[:, 0])
    labels[:, 4] = 0
    task = MultiLabel(5, thresholds=(0.4, 0.5, 0.6, 0.5, 0.5))
    found = task.metrics(LOGITS, labels)
    said = (1 / (1 + np.exp(-LOGITS.astype(np.float64)))) > np.array(task.thresholds)
    assert found["macro_f1"] == reference.f1_score(labels[:, :4], said[:, :4], average="macro", zero_division=0)
    assert found["average_precision"] == reference.average_precision_score(labels[:, :4].astype(int), LOGITS[:, :4])
    assert found["accuracy"] == reference.accuracy_score(labels, said)


def test_those_of_numbers() -> None:
    labels = RNG.normal(size=(97, 5)).astype(np.float32)
    found, said = Numbers(5).metrics(LOGITS, labels), LOGITS.astype(np.float64)
    truth = labels.astype(np.float64)
    assert found == {"r2": reference.r2_score(truth, said), "mae": reference.mean_absolute_error(truth, said)}
    task, standardised = Numbers(5).standardised(torch.from_numpy(labels * 7 + 3), torch.arange(97) % 2 == 0)
    inside = task.metrics(task.from_units(torch.from_numpy(LOGITS * 7 + 3)).numpy(), standardised.numpy())
    assert inside["r2"] == pytest.approx(found["r2"], abs=1e-4) and inside["mae"] == pytest.approx(7 * found["mae"])
    assert Numbers(5, metric="mae").decides(found) == -found["mae"] and Numbers(5).decides(found) == found["r2"]


def test_answers_that_are_not_finite_have_no_metric_but_those_of_classes() -> None:
    broken = LOGITS.copy()
    broken[:, 0] = np.nan
    found = Classes(5, metric="auroc").metrics(broken, np.zeros(97, np.int64))
    assert found["accuracy"] == found["macro_f1"] == 0 and np.isnan(found["auroc"])
    assert Classes(5).kept(torch.from_numpy(broken)).eq(NO_ANSWER).all()
    for task, labels in ((Numbers(5), LOGITS), (MultiLabel(5), (LOGITS > 0).astype(np.float32))):
        metrics = task.metrics(broken, labels)
        assert all(np.isnan(value) for name, value in metrics.items() if name != "accuracy")
        # A model whose metric is not known is worse than any other.
        assert task.decides(metrics) == -np.inf


def test_a_threshold_has_the_best_f1_that_there_is() -> None:
    labels = (RNG.random((97, 3)) < [0.1, 0.5, 0.9]).astype(np.float32)
    chances = np.clip(RNG.normal(0.3 + 0.3 * labels, 0.15), 0.001, 0.999)
    for column, threshold in enumerate(best_thresholds(labels, chances)):
        right, said = labels[:, column] > 0.5, chances[:, column]
        given = said > np.append(said, 0)[:, None]
        tried = 2 * (given & right).sum(1) / (given.sum(1) + right.sum())
        assert reference.f1_score(right, said > threshold) >= tried.max() - 1e-9
    assert best_thresholds(np.zeros((4, 1)), np.full((4, 1), 0.3)) == [0.5]
