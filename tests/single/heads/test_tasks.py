"""Several labels, numbers and row weights: both solvers against scikit-learn."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn import functional

from hvfreeze.comm.world import SoloWorld
from hvfreeze.heads import kernel as fitting
from hvfreeze.heads.kernel import KernelFit, KernelHead, fit_kernel
from hvfreeze.heads.linear import HeadFit, fit_linear
from hvfreeze.heads.multilevel import take
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.tasks import Classes, MultiLabel, Numbers, Task
from tests.single.heads.table import CLASSES, labelled_table

ROWS = 400


def table() -> tuple[Tensor, Tensor, Tensor]:
    """Return standardised features (N, 12), which rows are held out, and weights."""
    features, _, held_out = labelled_table(ROWS)
    features = features.double()
    deviation = features.std(0, correction=0)
    features = (features - features.mean(0)) / torch.where(deviation < 1e-6, 1.0, deviation)
    return features.float(), held_out, 0.5 + (torch.arange(ROWS) % 3).float()


def numbers_of(features: Tensor) -> Tensor:
    """Return two outputs of very different scale, (N, 2), and some noise."""
    noise = torch.randn(len(features), 2, generator=torch.Generator().manual_seed(5))
    return torch.stack([100 + 30 * features[:, 0] * features[:, 1], features[:, 0] - 2], 1) + 0.1 * noise


def labels_of(features: Tensor) -> Tensor:
    """Return three labels, (N, 3), of which the last is rare."""
    noise = 0.3 * torch.randn(len(features), 3, generator=torch.Generator().manual_seed(6))
    return (features[:, :3] + noise > torch.tensor([0.0, 0.3, 1.5])).float()


def moments(values: Tensor, weights: Tensor) -> tuple[Any, Any]:
    """Return the weighted mean and deviation of columns."""
    known = StandardScaler().fit(values.double().numpy(), sample_weight=weights.double().numpy())
    return known.mean_, known.scale_


def standardised(features: Tensor, weights: Tensor) -> Tensor:
    mean, deviation = moments(features, weights)
    return torch.from_numpy((features.double().numpy() - mean) / deviation).float()


def kernel(task: Task, labels: Tensor, *, weights: Tensor | None = None, **options: Any) -> KernelFit:
    features, held_out, _ = table()
    rows = RowsInMemory(features, labels, held_out, weights=weights)
    fit = fit_kernel(rows, task=task, world=SoloWorld(), memory_bytes=2**28, **options)
    assert fit is not None
    return fit


def linear(task: Task, labels: Tensor, *, weights: Tensor | None = None, **options: Any) -> HeadFit:
    features, held_out, _ = table()
    fit = fit_linear(RowsInMemory(features, labels, held_out, weights=weights), task=task, world=SoloWorld(), **options)
    assert fit is not None
    return fit


@pytest.mark.parametrize(("few", "centres"), [(1_500, None), (100, ROWS - 1)])
def test_numbers_are_fitted_as_by_kernel_ridge_with_sample_weights(
    few: int, centres: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "FEW", few)
    features, _, weights = table()
    labels = numbers_of(features)
    fit = kernel(Numbers(2), labels, weights=weights, penalties=[0.1], tolerance=1e-7, centres=centres)
    head = KernelHead(12, 2)
    take(head, fit)
    said = head(features).detach()
    torch.testing.assert_close(fit.answers, said, atol=1e-2, rtol=1e-3)
    rows = features @ fit.projection.t() + fit.shift
    gram = torch.exp(-torch.cdist(rows.double(), rows.double()).square()).numpy()
    mean, deviation = moments(labels, weights)
    reference = KernelRidge(alpha=0.1, kernel="precomputed")
    reference.fit(gram, (labels.numpy() - mean) / deviation, sample_weight=weights.numpy())
    wanted = reference.predict(gram) * deviation + mean
    # One row that is no centre changes little.
    np.testing.assert_allclose(said.numpy() / deviation, wanted / deviation, atol=0.1 if centres else 1e-3)
    whole = Numbers(2).measured(labels, torch.ones(ROWS))
    assert whole.score(said.double(), labels) == pytest.approx(r2_score(labels.numpy(), said.numpy()), abs=1e-6)


def test_held_out_numbers_choose_the_penalty_and_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "FEW", 100)
    fit = kernel(Numbers(2), numbers_of(table()[0]))
    assert fit.chosen is not None and fit.chosen.whole
    # R^2 is one less the squared error as a share of the variance, of nearly these rows.
    assert 0.3 < fit.chosen.held_out_accuracy < 1
    assert fit.chosen.held_out_loss == pytest.approx(1 - fit.chosen.held_out_accuracy, abs=0.15)


def test_linear_numbers_are_those_of_ridge() -> None:
    features, _, weights = table()
    labels = numbers_of(features)
    fit = linear(Numbers(2), labels, weights=weights, penalties=[0.01], tolerance=1e-4)
    # The loss is the mean over the two outputs.
    mean, deviation = moments(labels, weights)
    features = standardised(features, weights)
    reference = Ridge(alpha=0.01 * 2 * float(weights.sum()))
    reference.fit(features.numpy(), (labels.numpy() - mean) / deviation, sample_weight=weights.numpy())
    wanted = reference.predict(features.numpy())
    said = (table()[0] @ fit.weight.t() + fit.bias).numpy()
    np.testing.assert_allclose((said - mean) / deviation, wanted, atol=1e-3)


def test_each_label_has_a_logistic_regression_of_its_own() -> None:
    features, _, weights = table()
    labels = labels_of(features)
    fit = linear(MultiLabel(3), labels, weights=weights, penalties=[0.001], tolerance=1e-4)
    said = (features @ fit.weight.t() + fit.bias).numpy()
    features = standardised(features, weights)
    for label in range(3):
        reference = LogisticRegression(C=1 / (2 * 0.001 * float(weights.sum())), tol=1e-8, max_iter=5000)
        reference.fit(features.numpy(), labels[:, label].numpy(), sample_weight=weights.numpy())
        np.testing.assert_allclose(said[:, label], reference.decision_function(features.numpy()), atol=5e-3)


@pytest.mark.parametrize("few", [1_500, 100])
def test_labels_of_a_kernel_head_are_calibrated_one_by_one(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "FEW", few)
    features = table()[0]
    labels = labels_of(features)
    fit = kernel(MultiLabel(3), labels)
    assert fit.chosen is not None and fit.chosen.held_out_accuracy > 0.8
    frequent = labels.mean(0)
    assert fit.chosen.held_out_loss < 3 * float(functional.binary_cross_entropy(frequent.expand_as(labels), labels))
    head = KernelHead(12, 3)
    take(head, fit)
    chances = head(features).detach().sigmoid()
    torch.testing.assert_close(chances.mean(0), frequent, atol=0.1, rtol=0)


SOLVERS: dict[str, tuple[int, Any]] = {
    "linear": (0, fit_linear),
    "closed form": (1_500, partial(fit_kernel, memory_bytes=2**28)),
    "conjugate gradients": (100, partial(fit_kernel, memory_bytes=2**28)),
}


@pytest.mark.parametrize(("solver", "task"), list(zip(SOLVERS, [Classes(CLASSES), MultiLabel(3), Classes(CLASSES)])))
def test_a_weight_is_the_number_of_times_that_a_row_is_there(
    solver: str, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, fit = SOLVERS[solver]
    monkeypatch.setattr(fitting, "FEW", few)
    features, classes, held_out = labelled_table(ROWS)
    labels = {"classes": classes, "labels": labels_of(features)}[task.kind]
    times = 1 + torch.arange(ROWS) % 3
    place = torch.arange(ROWS).repeat_interleave(times)
    asked: dict[str, Any] = {"task": task, "world": SoloWorld(), "penalties": [0.1], "tolerance": 1e-6}
    answers = []
    for rows in (
        RowsInMemory(features, labels, held_out, weights=times.float()),
        RowsInMemory(features[place], labels[place], held_out[place], samples=place),
    ):
        found = fit(rows, **asked)
        if isinstance(found, KernelFit):
            head = KernelHead(12, task.outputs)
            take(head, found)
            said = head(features).detach()
            # Of more rows, a subset calibrates, which is another one here.
            answers.append(said if few > ROWS else (said - said.mean(0)) / said.std(0))
        else:
            answers.append(features @ found.weight.t() + found.bias)
    torch.testing.assert_close(*answers, atol=2e-3, rtol=2e-3)


def test_class_weights_move_answers_to_rare_classes() -> None:
    features, _, _ = table()
    random = torch.Generator().manual_seed(7)
    labels = (features[:, 0] + torch.randn(ROWS, generator=random) > 1.8).long()
    rare = int(labels.sum())
    assert 20 < rare < 60
    weights = torch.where(labels == 1, (ROWS - rare) / rare, 1.0)
    shares = [
        float((kernel(Classes(2), labels, weights=each).answers.argmax(1)).float().mean()) for each in (None, weights)
    ]
    assert shares[1] > 1.2 * shares[0], shares
    logistic = [linear(Classes(2), labels, weights=each) for each in (None, weights)]
    recalls = [
        float(((features @ fit.weight.t() + fit.bias).argmax(1) == 1)[labels == 1].float().mean()) for fit in logistic
    ]
    assert recalls[1] > recalls[0] + 0.2, recalls


def test_class_weights_shift_a_calibrated_head_towards_rare_classes() -> None:
    """Logits for 19 of 20 rows in one class become those for balanced classes: plus the logarithms of the weights."""
    labels = (torch.arange(2_000) % 20 == 0).long()
    place = labels + torch.randn(2_000, generator=torch.Generator().manual_seed(2))
    logits = functional.pad((place - 0.5 + np.log(1 / 19))[:, None], (1, 0)).double()
    weights = (10 / 19, 10.0)
    found = Classes(2, weights=weights).calibrate(
        logits / 2, labels, torch.tensor(weights)[labels], samples=len(labels)
    )
    assert found.scale.tolist() == pytest.approx([2, 2], rel=0.3)
    assert float(found.bias[1] - found.bias[0]) == pytest.approx(np.log(19), rel=0.2)
    chosen = found.apply(logits / 2).argmax(1)
    recalls = [float((chosen[labels == label] == label).double().mean()) for label in (0, 1)]
    assert min(recalls) > 0.6
    underflowed = Classes(2, weights=(1.0, 0.0)).calibrate(logits, labels, (labels == 0).float(), samples=len(labels))
    assert underflowed.bias.isfinite().all()
    unweighted = Classes(2).calibrate(logits / 2, labels, torch.ones(2_000), samples=len(labels))
    assert not unweighted.bias.any()
    assert float((unweighted.apply(logits / 2).argmax(1)[labels == 1] == 1).double().mean()) < 0.2


def test_a_kernel_head_has_the_bias_of_class_weights() -> None:
    features, _, _ = table()
    labels = (features[:, 0] + features[:, 1] ** 2 > 3.5).long()
    shares = torch.bincount(labels).double() / ROWS
    assert float(shares[1]) < 0.2
    task = Classes(2, weights=tuple((0.5 / shares).tolist()))
    fit = kernel(task, labels, weights=task.weights_of(labels, torch.arange(ROWS)))
    head = KernelHead(12, 2)
    take(head, fit)
    torch.testing.assert_close(head(features).detach(), fit.answers, atol=1e-4, rtol=1e-4)
    logarithms = torch.tensor(task.weights).log()
    part = (fit.bias / logarithms).tolist()
    assert part == pytest.approx([part[0]] * 2)
    assert 0 <= part[0] <= 1
