"""The solver alone: what it minimises, how it chooses, what it says where it cannot finish."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.comm.world import SoloWorld
from hvfreeze.data.batches import Batch, padded_batches
from hvfreeze.errors import UsageError
from hvfreeze.heads.linear import HeadFit, Subset, SumsOverRanks, fit_linear
from hvfreeze.heads.moments import FeaturesError, measure
from hvfreeze.heads.rows import Chunk, RowInfo, RowsInMemory, RowsOfBatches, gather
from hvfreeze.tasks import Classes
from tests.single.heads.table import CLASSES, labelled_table


def solve(table: tuple[Tensor, Tensor, Tensor], *, penalties: list[float], **options: float) -> HeadFit:
    rows = RowsInMemory(*table)
    return fit_linear(rows, task=Classes(CLASSES), world=SoloWorld(), penalties=penalties, **options)  # type: ignore[arg-type]


def gradient_norm(table: tuple[Tensor, Tensor, Tensor], fit: HeadFit) -> float:
    """Returns the norm of the objective's gradient at the solution, by autograd, in float64."""
    features, labels, _ = table
    mean, deviation = features.double().mean(0), features.double().std(0, correction=0)
    standardised = (features.double() - mean) / torch.where(deviation < 1e-6, 1.0, deviation)
    weights = fit.coefficients.clone().requires_grad_()
    loss = functional.cross_entropy(standardised @ weights[:, :-1].t() + weights[:, -1], labels)
    (loss + fit.penalty * weights[:, :-1].square().sum()).backward()
    assert weights.grad is not None
    return float(weights.grad.norm())


def test_the_gradient_vanishes_where_the_solver_says_so_and_its_bound_is_true() -> None:
    table = labelled_table(300)
    exact = solve(table, penalties=[0.01], tolerance=1e-5)
    assert exact.converged
    assert gradient_norm(table, exact) < 1e-6
    loose = solve(table, penalties=[0.01], tolerance=0.3)
    assert loose.converged and loose.passes < exact.passes
    distance = (loose.coefficients - exact.coefficients)[:, :-1].norm() / loose.coefficients[:, :-1].norm()
    assert 1e-4 < distance <= loose.error <= 0.3


def test_a_limit_of_steps_is_kept_and_reported() -> None:
    fit = solve(labelled_table(300), penalties=[1e-6], tolerance=1e-5, most_steps=2)
    assert (fit.steps, fit.converged) == (2, False)
    assert fit.error > 1e-5


def test_separable_rows_have_a_finite_solution() -> None:
    labels = torch.arange(40) % CLASSES
    table = (torch.eye(CLASSES)[labels], labels, torch.zeros(40, dtype=torch.bool))
    fit = solve(table, penalties=[1e-5], tolerance=1e-3)
    assert fit.converged
    assert (table[0] @ fit.weight.t() + fit.bias).argmax(1).equal(labels)
    assert gradient_norm(table, fit) < 1e-5


def test_the_chosen_penalty_is_stronger_where_labels_are_noise_and_all_rows_are_fitted_in_the_end() -> None:
    clean = labelled_table(400)
    noise = (clean[0], clean[1][torch.randperm(400, generator=torch.Generator().manual_seed(0))], clean[2])
    path = [1.0, 0.1, 0.01, 0.001, 0.0001]
    fits = [solve(table, penalties=path, tolerance=0.01) for table in (noise, clean)]
    assert fits[0].penalty > fits[1].penalty
    for table, fit in zip((noise, clean), fits):
        assert [trial.penalty for trial in fit.trials] == path[: len(fit.trials)]
        assert fit.penalty in [trial.penalty for trial in fit.trials]
        again = solve(table, penalties=[fit.penalty], tolerance=0.001)
        assert (fit.coefficients - again.coefficients).norm() <= 0.011 * again.coefficients.norm()
        assert fit.rows == 400


LARGE = 1.5e19
"""Its square is a float32, and that of twice as much is none."""


@pytest.mark.parametrize(
    ("numbers", "samples"),
    [
        ({0: math.nan}, (0,)),
        ({0: math.inf, 7: math.nan}, (0, 7)),
        ({0: 1e30}, (0,)),
        ({0: LARGE, 7: -LARGE}, (7,)),
    ],
)
def test_samples_whose_features_cannot_be_measured_are_named_and_no_others(
    numbers: dict[int, float], samples: tuple[int, ...]
) -> None:
    features, labels, held_out = labelled_table(20)
    for sample, number in numbers.items():
        features[sample, 3] = number
    with pytest.raises(FeaturesError, match="1 of 12 features, or their squares, are NaN or Inf") as refusal:
        measure(RowsInMemory(features, labels, held_out), world=SoloWorld())
    assert refusal.value.samples == samples


def test_held_out_rows_are_not_fitted_until_the_penalty_is_chosen() -> None:
    features, labels, held_out = labelled_table(700)
    world, rows = SoloWorld(), RowsInMemory(features, labels, held_out)
    standard = measure(rows, world=world)
    loss = SumsOverRanks(rows, standard, task=Classes(CLASSES), world=world)
    weights = torch.randn(loss.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    standardised = (features.double() - standard.mean) * standard.scale
    for fitted, point in (
        (~held_out, loss.at(weights, Subset(fold=0))),
        (held_out | True, loss.at(weights, Subset())),
    ):
        free = weights.clone().requires_grad_()
        logits = standardised @ free[:, :-1].t() + free[:, -1]
        expected = functional.cross_entropy(logits[fitted], labels[fitted])
        expected.backward()
        assert abs(point.loss - expected.item()) < 1e-6
        torch.testing.assert_close(point.gradient, free.grad, atol=1e-6, rtol=0)
    point = loss.at(weights, Subset(fold=0))
    assert abs(point.held_out_loss - functional.cross_entropy(logits[held_out], labels[held_out]).item()) < 1e-6
    assert point.held_out_score == pytest.approx(float((logits.argmax(1) == labels)[held_out].double().mean()))
    assert math.isnan(loss.at(weights, Subset()).held_out_loss)


def test_each_penalty_of_the_path_moves_the_solution_however_near_it_is() -> None:
    fit = solve(labelled_table(400), penalties=[1.0, 0.9, 0.8])
    assert min(trial.steps for trial in fit.trials) >= 1
    assert len({trial.held_out_loss for trial in fit.trials}) == len(fit.trials) > 1


class Streamed:
    """Rows computed again in each pass, in a compact type, in chunks of uneven size."""

    def __init__(self, table: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> None:
        self.width = table[0].shape[1]
        self.passes = 0
        samples, weights = torch.arange(len(table[1])), torch.ones(len(table[1]))
        self._table = (table[0].to(dtype), *table[1:], samples, weights)

    def chunks(self) -> Iterator[Chunk]:
        self.passes += 1
        for part in zip(*(column.split([100, 1, 150, 49]) for column in self._table)):
            features, *info = (column.clone() for column in part)
            yield Chunk(features, RowInfo(*info))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_may_be_streamed_and_compact(dtype: torch.dtype) -> None:
    table = labelled_table(300)
    table = (table[0].to(dtype).float(), *table[1:])
    rows = Streamed(table, dtype)
    fit = fit_linear(rows, task=Classes(CLASSES), world=SoloWorld(), penalties=[0.01], tolerance=1e-4)
    held = solve(table, penalties=[0.01], tolerance=1e-4)
    torch.testing.assert_close(fit.coefficients, held.coefficients, atol=1e-5, rtol=0)
    # One of the passes of `rows` only looked for the first row.
    assert rows.passes == fit.passes + 1


@pytest.mark.parametrize("penalties", [[], [0.0], [0.1, 0.1], [0.1, 1.0]])
def test_a_path_that_is_none_is_refused(penalties: list[float]) -> None:
    with pytest.raises(UsageError, match="must be above 0 and decreasing, at least one"):
        solve(labelled_table(50), penalties=penalties)


def batches_of(total: int, size: int) -> list[Batch]:
    return padded_batches(np.arange(total), lambda ids, views: torch.from_numpy(ids) % CLASSES, size)


@pytest.mark.parametrize("memory_bytes", [0, 10**6])
def test_rows_of_batches_are_fetched_once_where_they_fit_and_are_the_same_chunks_where_not(memory_bytes: int) -> None:
    """Batches of 16: the first 32 make a chunk, for at least 512 rows."""
    features = labelled_table(530)[0]
    fetched: list[int] = []
    buffer = torch.empty(16, features.shape[1])

    def fetch(batch: Batch) -> Tensor:
        fetched.append(int(batch.ids[0]))
        return buffer.copy_(features[batch.ids])

    rows = RowsOfBatches(
        batches_of(530, 16),
        fetch,
        expect=lambda batches: None,
        width=features.shape[1],
        held_out=np.arange(530) % 10 == 0,
        weights=(np.arange(530) % 3).astype(np.float32),
        memory_bytes=memory_bytes,
    )
    assert next(iter(rows.chunks())).features.equal(features[:512])
    for _ in range(2):
        chunks = [(c.features.clone(), *vars(c.info).values()) for c in rows.chunks()]
        parts = [torch.cat(column) for column in zip(*chunks)]
        assert [len(chunk[1]) for chunk in chunks] == [512, 18]
        assert parts[0].equal(features)
        assert parts[1].equal(torch.arange(530) % CLASSES)
        assert parts[2].equal(torch.arange(530) % 10 == 0)
        assert parts[3].equal(torch.arange(530)) and parts[4].equal((torch.arange(530) % 3).float())
    once, begun = list(range(0, 530, 16)), list(range(0, 512, 16))
    assert fetched == (once if memory_bytes else [*begun, *once, *once])


def test_gathering_ends_where_it_is_asked_to() -> None:
    rows = RowsInMemory(*labelled_table(1400))
    seen: list[int] = []

    def stop(count: int) -> bool:
        seen.append(count)
        return count > 600

    assert gather(rows, world=SoloWorld(), stop=stop)
    assert seen == [512, 1024]
    assert not gather(rows, world=SoloWorld(), stop=lambda count: False)
