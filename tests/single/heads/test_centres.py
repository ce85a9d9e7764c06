"""Rows compared with some of them only; and many rows, of which a sample decides how all become points."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.comm.world import SoloWorld
from hvfreeze.data.batches import Batch, padded_batches
from hvfreeze.errors import NumericsError
from hvfreeze.heads import kernel as fitting
from hvfreeze.heads import kernel_products
from hvfreeze.heads.kernel import ALL_COMPARED, CENTRES, KernelFit, centres_for, fit_kernel
from hvfreeze.heads.kernel_products import gaussian
from hvfreeze.heads.preconditioners import cholesky
from hvfreeze.heads.rows import RowsInMemory, RowsOfBatches
from hvfreeze.tasks import Classes
from tests.single.heads.table import CLASSES, best_scale, labelled_table
from tests.single.heads.test_kernel import PLENTY, Table, answers, found

SAMPLED = 24
"""Of batches of 16 rows."""


def targets(labels: Tensor) -> Tensor:
    return functional.one_hot(labels, CLASSES).double() - 1 / CLASSES


def dense(centres: Tensor, points: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """Return the weights for centres, (M, C), by the formula."""
    across, core = gaussian(points.double(), centres.double()), gaussian(centres.double(), centres.double())
    return torch.linalg.solve(across.t() @ across + penalty * core, across.t() @ targets(labels))


def test_weights_of_centres_solve_the_normal_equations_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "FEW", 300)
    table = labelled_table(900)
    features, labels, held_out = table
    everything = found(table)
    fit = found(table, centres=200, tolerance=1e-5)
    assert fit.converged and (fit.rows, fit.compared_with) == (900, 200)
    assert torch.isin(fit.centres, everything.centres).all(), "centres are rows"
    points = everything.centres
    wanted = dense(fit.centres, points, labels, fit.penalty)
    said, theirs = (
        gaussian(points.double(), fit.centres.double()) @ each for each in (fit.weight.t().double(), wanted)
    )
    torch.testing.assert_close(said / said.norm(), theirs / theirs.norm(), atol=1e-4, rtol=0)
    torch.testing.assert_close(fit.answers, answers(fit, features), atol=0.02, rtol=0.01)
    assert fit.loss == pytest.approx(float(functional.cross_entropy(fit.answers, labels)), rel=1e-4)
    # Held-out rows judge a fit to all others, among whose centres they may be, without their labels.
    others = dense(fit.centres, points[~held_out], labels[~held_out], fit.penalty)
    said = gaussian(points[held_out].double(), fit.centres.double()) @ others
    assert fit.chosen is not None and fit.chosen.whole
    assert fit.chosen.held_out_loss == pytest.approx(best_scale(said, labels[held_out])[1], rel=0.01)


def test_with_all_rows_as_centres_it_is_the_head_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "FEW", 300)
    table = labelled_table(500)
    features = table[0]
    whole = found(table, tolerance=1e-6)
    monkeypatch.setattr(fitting.Problem, "fit_all", lambda problem, chosen: problem.fit_centres(500, chosen))
    same = found(table, tolerance=1e-5)
    said, wanted = answers(same, features), answers(whole, features)
    assert float((said - wanted).norm() / wanted.norm()) < 0.01
    assert same.penalty == whole.penalty and same.chosen is not None and whole.chosen is not None
    assert same.chosen.held_out_loss == pytest.approx(whole.chosen.held_out_loss, rel=0.01)


@pytest.mark.parametrize(("centres", "rounded_from"), [(300, 0), (None, 2000)])
def test_kernel_values_that_do_not_fit_into_memory_are_recomputed_with_the_same_bits(
    centres: int | None, rounded_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kernel_products, fitting):
        monkeypatch.setattr(module, "ROUNDED_FROM", rounded_from)
    monkeypatch.setattr(fitting, "FEW", 300)
    table = labelled_table(1203)
    kept = found(table, centres=centres)
    for memory_bytes in (0, 4 * 1203 * 600):
        anew = found(table, centres=centres, memory_bytes=memory_bytes)
        assert torch.equal(kept.weight, anew.weight) and kept.summary() == anew.summary()


def test_a_sample_of_rows_saves_passes_where_there_are_many_for_each_centre(monkeypatch: pytest.MonkeyPatch) -> None:
    table = labelled_table(2403)
    many = found(table, penalties=[0.03], centres=100)
    monkeypatch.setattr(fitting, "SAMPLED", 1)
    few = found(table, penalties=[0.03], centres=100)
    assert many.converged and few.converged and many.steps <= few.steps * 2 / 3, (many.steps, few.steps)
    assert float((many.answers - few.answers).norm() / few.answers.norm()) < 0.1


def test_equal_centres_do_no_harm() -> None:
    matrix = torch.ones(5, 5, dtype=torch.float64)
    factor = cholesky(matrix.clone() - 1e-6 * torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(factor @ factor.t(), matrix, atol=1e-3, rtol=0)


def test_the_solver_ends_where_answers_are_off_by_the_tolerance() -> None:
    table = labelled_table(2403)
    fit = found(table, penalties=[0.03], centres=100)
    exact = found(table, penalties=[0.03], centres=100, tolerance=1e-6)
    # Both scales were chosen on the answers, which are nearly the same.
    off = float((fit.answers - exact.answers).norm() / exact.answers.norm())
    assert fit.steps < exact.steps and fit.error / 4 < off < 4 * fit.error, (off, fit.error)


def test_rounding_changes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "FEW", 300)
    table = labelled_table(1203)
    whole = found(table, penalties=[0.1], tolerance=1e-4)
    monkeypatch.setattr(kernel_products, "ROUNDED_FROM", 1203)
    rounded = found(table, penalties=[0.1], tolerance=1e-4)
    assert not torch.equal(whole.weight, rounded.weight)
    assert float((whole.answers - rounded.answers).norm() / whole.answers.norm()) < 1e-3


def test_centres_do_not_depend_on_the_order_of_rows() -> None:
    features, labels, held_out = labelled_table(400)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    fits = [
        fit_kernel(
            RowsInMemory(features[rows], labels[rows], held_out[rows], rows),
            task=Classes(CLASSES),
            world=SoloWorld(),
            memory_bytes=PLENTY,
            centres=100,
        )
        for rows in (torch.arange(400), order)
    ]
    assert fits[0] is not None and fits[1] is not None
    torch.testing.assert_close(fits[0].centres, fits[1].centres, atol=1e-4, rtol=0)
    first, second = fits[0].answers[order], fits[1].answers
    assert float((first - second).norm() / first.norm()) < 0.01


def test_centres_are_all_rows_or_a_fixed_number_or_as_many_as_are_asked_for() -> None:
    assert centres_for(ALL_COMPARED, None) == ALL_COMPARED
    assert centres_for(ALL_COMPARED + 1, None) == centres_for(10**7, None) == CENTRES
    assert centres_for(500, 700) == 500 and centres_for(ALL_COMPARED, 7) == 7


def streamed(table: Table, fetched: list[int], *, sampled: int | None = SAMPLED) -> RowsOfBatches:
    """Return rows in batches of 16 of which some, spread over the samples, are the sample."""
    features, labels, held_out = table
    rows = len(labels)

    def fetch(batch: Batch) -> Tensor:
        fetched.append(batch.counted)
        return features[batch.ids]

    def batches(ids: np.ndarray) -> list[Batch]:
        return padded_batches(ids, lambda ids, views: labels[torch.from_numpy(ids)], 16)

    step = rows // (16 * (sampled or 1))
    few = np.arange(rows) % step == 0
    first = [] if sampled is None else batches(np.arange(rows)[few])
    others = batches(np.arange(rows) if sampled is None else np.arange(rows)[~few])
    return RowsOfBatches(
        [*first, *others],
        fetch,
        expect=lambda batches: None,
        width=features.shape[1],
        held_out=held_out.numpy(),
        memory_bytes=PLENTY,
        sampled=None if sampled is None else len(first),
    )


def fit_streamed(table: Table, fetched: list[int], *, sampled: int | None = SAMPLED) -> KernelFit:
    rows = streamed(table, fetched, sampled=sampled)
    fit = fit_kernel(rows, task=Classes(CLASSES), world=SoloWorld(), memory_bytes=PLENTY)
    assert fit is not None
    return fit


def test_of_many_rows_a_sample_decides_how_points_are_made_and_each_row_is_computed_once() -> None:
    table = labelled_table(1200)
    fetched: list[int] = []
    fit = fit_streamed(table, fetched)
    assert sum(fetched) == 1200, "rows of the sample are computed twice"
    assert fit.rows == 1200 and bool(fit.used.all()) and len(fit.answers) == len(fit.labels) == 1200
    whole = fit_streamed(table, [], sampled=None)
    assert not torch.equal(fit.projection, whole.projection), "all rows were looked at first"
    agree = float((answers(fit, table[0]).argmax(1) == answers(whole, table[0]).argmax(1)).double().mean())
    assert agree > 0.97, agree
    right = float((fit.answers.argmax(1) == fit.labels).double().mean())
    assert right == pytest.approx(float((answers(fit, table[0]).argmax(1) == table[1]).double().mean()), abs=0.01)


def test_no_features_are_left_in_memory_when_all_have_become_points() -> None:
    rows = streamed(labelled_table(1200), [])
    assert fit_kernel(rows, task=Classes(CLASSES), world=SoloWorld(), memory_bytes=PLENTY, penalties=[0.1]) is not None
    assert rows._chunks == {}


def test_damaged_samples_are_left_out_whether_in_the_sample_or_not() -> None:
    (features, labels, held_out), damaged = labelled_table(1200), [3, 700]
    features[damaged] *= 1e5
    fit = fit_streamed((features, labels, held_out), [])
    assert fit.left_out == tuple(damaged) and fit.rows == 1200 - len(damaged)
    assert sorted(set(range(1200)) - set(map(int, fit_order(fit)))) == sorted(fit_places(damaged))


def fit_order(fit: KernelFit) -> Tensor:
    return fit.used.nonzero().flatten()


def fit_places(samples: list[int]) -> list[int]:
    """Return where samples are among the rows of `streamed`."""
    step = 1200 // (16 * SAMPLED)
    order = [*range(0, 1200, step), *(row for row in range(1200) if row % step)]
    return [order.index(sample) for sample in samples]


def test_a_number_that_is_none_is_refused_and_named_also_outside_of_the_sample() -> None:
    features, labels, held_out = labelled_table(1200)
    features[700, 2] = torch.nan
    with pytest.raises(NumericsError, match=r"NaN or Inf.* in sample 700;"):
        fit_streamed((features, labels, held_out), [])
