"""`hvfreeze.fit_head` alone: what it fits, and what it refuses."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hvfreeze
from hvfreeze.comm.world import SoloWorld
from hvfreeze.errors import UsageError
from hvfreeze.heads.linear import Subset
from hvfreeze.heads.rows import RowInfo
from hvfreeze.integration.fit_head import weighted_rows, with_class_weights
from hvfreeze.integration.optimizer import DistributedOptimizer
from hvfreeze.tasks import Classes, MultiLabel, Numbers, Task


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, outputs))


def data(rows: int = 300) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 6, generator=random)
    return inputs, (inputs[:, :3] + 0.3 * torch.randn(rows, 3, generator=random)).argmax(1)


def batches(*columns: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*columns), batch_size=32)


def test_the_last_layer_becomes_logistic_regression_on_its_inputs_and_nothing_else_changes() -> None:
    model, (inputs, labels) = network(), data()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    fit = hvfreeze.fit_head(model, batches(inputs, labels), penalty=0.01)
    assert fit.rows == 300 and model.training and all(module.training for module in model)
    after = model.state_dict()
    assert [name for name in after if not torch.equal(after[name], before[name])] == ["4.weight", "4.bias"]
    model.eval()
    features = model[:4](inputs).detach().numpy().astype(np.float64)
    features = (features - features.mean(0)) / features.std(0)
    reference = LogisticRegression(C=1 / (2 * 0.01 * 300), tol=1e-8, max_iter=5000).fit(features, labels.numpy())
    chances = model(inputs).softmax(1).detach().numpy()
    np.testing.assert_allclose(chances, reference.predict_proba(features), atol=0.05)


def test_held_out_samples_choose_a_penalty_also_of_a_wrapped_model() -> None:
    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model, (inputs, labels) = network(), data()
    fit = hvfreeze.fit_head(Wrapped(model), batches(inputs, labels))
    assert fit.chosen is not None and fit.chosen.held_out_accuracy > 0.6
    assert float((model.eval()(inputs).argmax(1) == labels).float().mean()) > 0.7


@torch.no_grad()
def test_labels_and_numbers_and_class_weights() -> None:
    inputs, labels = data()
    model = network(outputs=1)
    fit = hvfreeze.fit_head(model, batches(inputs, inputs[:, 0] * 5 + 100), task="numbers")
    assert fit.chosen is not None and fit.chosen.held_out_accuracy > 0.8
    assert float((model.eval()(inputs)[:, 0] - (inputs[:, 0] * 5 + 100)).abs().mean()) < 2
    model = network(outputs=2)
    fit = hvfreeze.fit_head(model, batches(inputs, (inputs[:, :2] > 0).float()), task="labels")
    assert float(((model.eval()(inputs) > 0) == (inputs[:, :2] > 0)).float().mean()) > 0.85
    rare = (labels == 1) & (torch.arange(300) % 3 == 0)
    found = []
    for weights in (None, [1.0, 30.0]):
        model = network(outputs=2)
        hvfreeze.fit_head(model, batches(inputs, rare.long()), class_weights=weights)
        found.append(float(model.eval()(inputs).argmax(1).float().sum()))
    assert found[0] < found[1], found


def held_out_labels(labels: Tensor, task: Task) -> Tensor:
    """Labels of the samples that choose the penalty."""
    _, rows = weighted_rows(torch.zeros(len(labels), 1, 1), labels, None, None, task, SoloWorld())
    return torch.cat([labels[:0], *(chunk.info.labels[chunk.info.held_out] for chunk in rows.chunks())])


def test_of_labels_and_numbers_all_kinds_are_held_out_too() -> None:
    labels = torch.zeros(200, 2)
    labels[:20, 0] = 1
    assert held_out_labels(labels, MultiLabel(2)).sum(0).tolist() == [2, 0]
    numbers = torch.arange(200.0)[:, None]
    assert (held_out_labels(numbers, Numbers(1)).flatten() // 20).long().bincount().tolist() == [2] * 10
    assert len(held_out_labels(torch.arange(30), Classes(30))) == 3, "also where each class has one sample"
    assert not len(held_out_labels(numbers[:0], Numbers(1))), "a rank may have no samples"


@pytest.mark.parametrize("rows", [300, 1000])
def test_classes_in_turns_are_fitted_and_held_out_alike(rows: int) -> None:
    labels = torch.arange(rows) % 10
    inputs = torch.eye(10)[labels] + 0.3 * torch.randn(rows, 10, generator=torch.Generator().manual_seed(0))
    for order in (torch.arange(rows), labels.argsort(stable=True)):
        assert held_out_labels(labels[order], Classes(10)).bincount().tolist() == [rows // 100] * 10
        fit = hvfreeze.fit_head(nn.Linear(10, 10), batches(inputs[order], labels[order]))
        assert fit.chosen is not None and fit.chosen.held_out_accuracy > 0.8 and fit.penalty < 0.5
    # With so few rows the others choose in folds, which have all classes too.
    info = RowInfo(labels, torch.zeros(rows, dtype=torch.bool), torch.arange(rows), torch.ones(rows))
    assert all(labels[Subset(fold, 5).judging(info)].bincount().min() > 0 for fold in range(1, 5))


def test_equal_class_weights_are_none_and_ranks_without_samples_count_alike() -> None:
    labels, ones, summed = torch.tensor([0, 1, 2, 2]), torch.ones(4), list[torch.dtype]()
    given = with_class_weights(Classes(3), labels, ones, [100.0] * 3, SoloWorld())
    assert given.weights == pytest.approx((1, 1, 1))

    def allreduce(mine: Tensor, *, name: str) -> Tensor:
        summed.append(mine.dtype)
        return mine + 1

    world = Mock(allreduce_sum=allreduce)
    for some in (labels, labels[:0]):
        with_class_weights(Classes(3), some, ones[: len(some)], "balanced", world)
    assert summed == [torch.float64] * 2


def test_weights_whose_product_is_0_leave_samples_out() -> None:
    inputs, classes = data()
    options = {"class_weights": [1e-30, 1.0, 1.0], "sample_weight": torch.full((300,), 1e-30)}
    _, rows = weighted_rows(inputs[:, None], classes, *options.values(), Classes(3), SoloWorld())  # type: ignore[arg-type]
    kept = torch.cat([chunk.info.labels for chunk in rows.chunks()])
    assert (kept > 0).all() and len(kept) == int((classes > 0).sum())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["balanced", "numbers"])
def test_a_sample_of_weight_2_counts_twice_and_one_of_weight_0_not(kind: str) -> None:
    inputs, classes = data()
    rare = ((classes == 1) & (torch.arange(300) % 3 == 2)).long()  # of weight 2, all
    labels, given = {
        "balanced": (rare, {"class_weights": "balanced"}),
        "numbers": (inputs[:, :3] ** 2, {"task": "numbers"}),
    }[kind]
    times = torch.arange(300) % 3
    place = torch.arange(300).repeat_interleave(times)
    answers = []
    for rows, weight in ((torch.arange(300), times), (place, None)):
        model, loader = network(2 if kind == "balanced" else 3), batches(inputs[rows], labels[rows])
        hvfreeze.fit_head(model, loader, sample_weight=weight, penalty=0.01, **given)  # type: ignore[arg-type]
        answers.append(model.eval()(inputs))
    torch.testing.assert_close(*answers, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("model", "labels", "options", "refusal"),
    [
        (nn.Sequential(nn.Linear(6, 3), nn.Softmax(1)), None, {}, "does not end in an nn.Linear with a bias"),
        (nn.Linear(6, 3, bias=False), None, {}, "does not end in an nn.Linear with a bias"),
        (nn.Linear(6, 2), None, {}, "a label is 2, and the last layer has 2 outputs"),
        (nn.Linear(6, 3), torch.rand(300), {}, "must be 32 classes"),
        (nn.Linear(6, 3), torch.rand(300, 3), {"task": "labels"}, "labels must be 0 or 1"),
        (nn.Linear(6, 3), torch.rand(300, 2), {"task": "numbers"}, "must have that of the logits"),
        (nn.Linear(6, 3), None, {"task": "boxes"}, "task \\(boxes\\) must be one of classes, labels, numbers"),
        (nn.Linear(6, 3), None, {"class_weights": [1.0, 2.0]}, "must be 3 numbers above 0"),
        (nn.Linear(6, 3), None, {"class_weights": "auto"}, "must be balanced"),
        (nn.Linear(6, 3), None, {"sample_weight": [1.0, 2.0]}, "must have a number for each of the 300 samples"),
        (
            nn.Linear(6, 3),
            None,
            {"sample_weight": [-1.0] * 300},
            r"\(-1.0, of sample 0\) must be a number of at least 0",
        ),
        (nn.Linear(6, 3), None, {"sample_weight": [float("nan")] * 300}, r"\(nan, of sample 0\) must be a number"),
        (nn.Linear(6, 3), None, {"sample_weight": [0.0] * 300}, "there are no samples to fit"),
        (nn.Linear(6, 3), None, {"penalty": 0.0}, "must be above 0"),
        (nn.Linear(6, 3), None, {"penalty": float("nan")}, "must be above 0"),
        (nn.Linear(6, 3), None, {"penalty": float("inf")}, "must be above 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    model: nn.Module, labels: Tensor | None, options: dict[str, object], refusal: str
) -> None:
    inputs, classes = data()
    with pytest.raises(UsageError, match=refusal):
        hvfreeze.fit_head(model, batches(inputs, classes if labels is None else labels), **options)  # type: ignore[arg-type]


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(UsageError, match="has no batches"):
        hvfreeze.fit_head(nn.Linear(6, 3), [])


def test_frozen_blocks_keep_their_mode_and_count_as_unchanged() -> None:
    model, (inputs, labels) = network(), data()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, world=SoloWorld())
    optimizer.freezer.freeze(1)
    hvfreeze.fit_head(model, batches(inputs, labels), penalty=0.01)
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.freezer.thaw(0)
    assert all(module.training for module in model.modules())
