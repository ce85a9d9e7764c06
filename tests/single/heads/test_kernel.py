"""Kernel heads: the linear system, the choice of the penalty, and the saved form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.comm.world import SoloWorld, World
from hvfreeze.data.batches import padded_batches
from hvfreeze.errors import UsageError
from hvfreeze.heads import kernel as fitting
from hvfreeze.heads.kernel import KernelFit, KernelHead, fit_kernel
from hvfreeze.heads.kernel_products import gaussian
from hvfreeze.heads.leave_one_out import inverted, residuals, views_of
from hvfreeze.heads.multilevel import take
from hvfreeze.heads.projection import AllRows
from hvfreeze.heads.rows import RowsInMemory, RowsOfBatches
from hvfreeze.heads.solution import Solution
from hvfreeze.heads.solve import FitTerms, solve
from hvfreeze.tasks import SCALES, Classes
from tests.single.heads.table import CLASSES, best_scale, labelled_table
from tests.single.ranks_in_threads import on_ranks

PLENTY = 2**30
Table = tuple[Tensor, Tensor, Tensor]


def found(table: Table, *, memory_bytes: int = PLENTY, **options: object) -> KernelFit:
    rows = RowsInMemory(*table)
    fit = fit_kernel(rows, task=Classes(CLASSES), world=SoloWorld(), memory_bytes=memory_bytes, **options)  # type: ignore[arg-type]
    assert fit is not None
    return fit


def rings(rows: int = 600) -> Table:
    """Return points of two classes, the second around the first: no plane divides them."""
    random = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 2, (rows,), generator=random)
    angles = 2 * torch.pi * torch.rand(rows, generator=random)
    radius = 1 + labels + 0.1 * torch.randn(rows, generator=random)
    points = torch.stack([radius * angles.cos(), radius * angles.sin()], 1)
    return points, labels, torch.rand(rows, generator=random) < 0.15


def answers(fit: KernelFit, features: Tensor) -> Tensor:
    head = KernelHead(features.shape[1], len(fit.weight))
    take(head, fit)
    with torch.no_grad():
        return head(features)


@pytest.mark.parametrize("few", [1_500, 100])
def test_the_solution_is_scikit_learns_kernel_ridge(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.kernel_ridge import KernelRidge

    monkeypatch.setattr(fitting, "FEW", few)
    features, labels, held_out = labelled_table(700)
    fit = found((features, labels, held_out), penalties=[0.1], tolerance=1e-6)
    assert fit.converged and fit.rows == 700
    points = fit.centres.double()
    kernel = (-torch.cdist(points, points).square()).exp().numpy()
    targets = functional.one_hot(labels, CLASSES).numpy() - 1 / CLASSES
    reference = KernelRidge(alpha=0.1, kernel="precomputed").fit(kernel, targets)
    scale = float(fit.weight.t().double().norm() / np.linalg.norm(reference.dual_coef_))
    assert min(abs(scale - each) for each in SCALES) < 1e-4 * scale
    np.testing.assert_allclose(fit.weight.t().numpy() / scale, reference.dual_coef_, atol=1e-4)
    said = answers(fit, features)
    torch.testing.assert_close(fit.answers, said, atol=1e-3, rtol=1e-3)
    np.testing.assert_allclose(said.numpy() / scale, reference.predict(kernel), atol=1e-3)
    assert float(functional.cross_entropy(said, labels)) == pytest.approx(fit.loss, rel=1e-3)


def test_points_are_partly_whitened_and_two_of_them_are_as_far_apart_as_is_said() -> None:
    features, labels, held_out = labelled_table(700)
    fit = found((features, labels, held_out), penalties=[0.1])
    variances = fit.centres.double().var(0, correction=0)
    assert float(2 * variances.sum()) == pytest.approx(1.5, rel=0.01)
    standardised = (features.double() - features.double().mean(0)) / features.double().std(0, correction=0)
    standardised[:, 5] = 0
    values = torch.linalg.eigvalsh(standardised.t() @ standardised / 700).flip(0)[:11]
    wanted = values.pow(0.7) / values.pow(0.7).sum()
    torch.testing.assert_close(variances[:11] / variances.sum(), wanted, atol=0.02, rtol=0)


def test_what_no_plane_divides_is_learnt() -> None:
    points, labels, held_out = rings()
    fit = fit_kernel(RowsInMemory(points, labels, held_out), task=Classes(2), world=SoloWorld(), memory_bytes=PLENTY)
    assert fit is not None and fit.chosen is not None
    assert fit.chosen.held_out_accuracy > 0.95
    others, truth, _ = (column[300:] for column in rings(900))
    assert float((answers(fit, others).argmax(1) == truth).float().mean()) > 0.95


@pytest.mark.parametrize(
    ("penalties", "chosen"),
    [
        pytest.param([10, 1e-5], 10, id="the weak one follows wrong labels"),
        pytest.param([1000, 1], 1, id="the strong one follows no label"),
        pytest.param([10, 9.8], 9.8, id="of two that are level the weaker"),
    ],
)
def test_rows_that_are_left_out_choose_the_penalty_where_labels_are_wrong(
    penalties: list[float], chosen: float
) -> None:
    points, labels, held_out = rings()
    # Directions that tell nothing, in which each row has room to follow its own label.
    points = torch.cat([points, torch.randn(600, 6, generator=torch.Generator().manual_seed(2))], 1)
    wrong = torch.rand(600, generator=torch.Generator().manual_seed(1)) < 0.1
    rows = RowsInMemory(points, labels ^ wrong, held_out)
    fit = fit_kernel(rows, task=Classes(2), world=SoloWorld(), memory_bytes=PLENTY, penalties=penalties)
    assert fit is not None
    losses = {trial.penalty: trial.held_out_loss for trial in fit.trials}
    # The choice is far from a tie, so that it is the same on every processor.
    ratio = max(losses.values()) / min(losses.values())
    assert ratio < 1.02 if chosen == 9.8 else ratio > 1.5, losses
    assert fit.penalty == chosen, losses


@pytest.mark.parametrize("kernel", [False, True])
def test_a_solution_leaves_neither_rows_nor_a_second_copy_of_the_head(*, kernel: bool) -> None:
    features, labels, _ = labelled_table(530)
    batches = padded_batches(np.arange(530), lambda ids, views: labels[torch.from_numpy(ids)], 16)
    terms = FitTerms(np.arange(530) % 10 == 0, trained=False, sampled=None)
    rows = RowsOfBatches(
        batches,
        lambda batch: features[torch.from_numpy(batch.ids)],
        expect=lambda batches: None,
        width=features.shape[1],
        held_out=terms.held_out,
        memory_bytes=PLENTY,
    )
    layer = KernelHead(rows.width, CLASSES) if kernel else torch.nn.Linear(rows.width, CLASSES)
    asked: dict[str, Any] = {"world": SoloWorld(), "centres": None}
    fit = solve(rows, layer, Classes(CLASSES), terms, **asked, stop=lambda rows, note="": False, count=lambda *of: None)
    assert type(fit) is Solution and fit.rows == 530
    assert bool(rows._chunks) != kernel


def test_of_many_rows_a_part_chooses_all_are_fitted_and_held_out_rows_judge_a_fit_to_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = labelled_table(900)
    _, labels, held_out = table
    monkeypatch.setattr(fitting, "FEW", 300)
    fit = found(table, tolerance=1e-7)
    kernel, fitted = gaussian(fit.centres, fit.centres).double(), ~held_out
    system = kernel[fitted][:, fitted] + fit.penalty * torch.eye(int(fitted.sum()), dtype=torch.float64)
    answered = torch.linalg.solve(system, functional.one_hot(labels, CLASSES).double()[fitted] - 1 / CLASSES)
    said, truth = kernel[held_out][:, fitted] @ answered, labels[held_out]
    assert fit.rows == 900 and fit.centres.shape[0] == 900
    held = [trial.held_out_accuracy * int(held_out[::3].sum()) for trial in fit.trials if not trial.whole]
    assert len(held) == 3 and all(abs(right - round(right)) < 1e-6 for right in held), "judged by the part's rows"
    assert fit.chosen is not None and fit.chosen.whole
    assert fit.chosen.held_out_accuracy == pytest.approx(float((said.argmax(1) == truth).double().mean()), abs=0.01)
    assert fit.chosen.held_out_loss == pytest.approx(best_scale(said, truth)[1], rel=0.01)
    assert fit.steps > 0
    monkeypatch.setattr(fitting, "FEW", 900)
    whole = found(table, penalties=[fit.penalty])
    assert whole.steps == 0, "in closed form"
    torch.testing.assert_close(fit.weight / fit.weight.norm(), whole.weight / whole.weight.norm(), atol=1e-5, rtol=0)


def test_each_sample_of_few_is_left_out_in_turn_with_all_its_views() -> None:
    random = torch.Generator().manual_seed(2)
    points = torch.randn(21, 3, generator=random, dtype=torch.float64)
    kernel, right = gaussian(points, points), torch.randn(21, 2, generator=random, dtype=torch.float64)
    samples = torch.arange(21) % 9
    answers_then = right - residuals(*inverted(kernel, right, 0.1), views_of(samples))
    for sample in range(9):
        fitted, left = samples != sample, samples == sample
        system = kernel[fitted][:, fitted] + 0.1 * torch.eye(int(fitted.sum()), dtype=torch.float64)
        anew = kernel[left][:, fitted] @ torch.linalg.solve(system, right[fitted])
        torch.testing.assert_close(answers_then[left], anew)


def test_a_penalty_that_leaves_the_kernel_of_equal_rows_singular_is_refused() -> None:
    alike, right = torch.ones(3, 3, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"penalty \(1e-30\) is too small for 3 rows"):
        inverted(alike, right, 1e-30)


def test_an_error_of_the_closed_form_fit_which_rank_0_makes_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "fit_few", Mock(side_effect=UsageError("penalty (1e-30) is too small")))

    def fit(world: World) -> object:
        rows = RowsInMemory(*labelled_table(60), first=60 * world.rank)
        return fit_kernel(rows, task=Classes(CLASSES), world=world, memory_bytes=PLENTY)

    with pytest.raises(UsageError, match="too small") as refusal:
        on_ranks(2, fit)
    assert refusal.value.everywhere


def test_where_the_network_has_seen_the_other_labels_only_held_out_rows_choose() -> None:
    random = torch.Generator().manual_seed(4)
    features, labels = torch.randn(120, 60, generator=random), torch.randint(0, CLASSES, (120,), generator=random)
    held_out = torch.arange(120) % 4 == 0
    # What tuning does to the samples that it saw: their features tell their labels, which nothing else does.
    features[~held_out] += 3 * functional.one_hot(labels[~held_out], 60)
    fooled, warned = (found((features, labels, held_out), trained=trained) for trained in (False, True))
    others, truth = torch.randn(500, 60, generator=random), torch.randint(0, CLASSES, (500,), generator=random)
    losses = [float(functional.cross_entropy(answers(fit, others), truth)) for fit in (fooled, warned)]
    assert losses[0] > 1.15 * math.log(CLASSES) and losses[1] < 1.05 * math.log(CLASSES), losses


def test_features_that_say_nothing_give_a_head_that_knows_nothing() -> None:
    _, labels, held_out = labelled_table(200)
    fit = found((torch.zeros(200, 12), labels, held_out))
    said = answers(fit, torch.zeros(2, 12))
    assert bool(said.isfinite().all()) and float(said.std()) < 1
    assert fit.converged and not fit.projection.any()


def test_a_limit_of_steps_is_kept_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "FEW", 100)
    fit = found(labelled_table(600), penalties=[1e-5], tolerance=1e-6, most_steps=2)
    assert (fit.steps, fit.converged) == (2, False)
    assert fit.error > 1e-6


def answered(asked: Iterator[bool], note: str) -> bool:
    return next(asked, True)


def test_it_ends_without_a_head_when_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = partial(fit_kernel, RowsInMemory(*labelled_table(300)), task=Classes(CLASSES), world=SoloWorld())
    assert fit(memory_bytes=PLENTY, watch=lambda note: True) is None, "while the penalty is chosen"
    monkeypatch.setattr(fitting, "FEW", 100)
    assert fit(memory_bytes=PLENTY, read=lambda rows: rows == 300) is None, "while features come"
    for centres in (None, 100):
        for before in (1, 2):
            asked = iter([False] * before)
            assert fit(memory_bytes=PLENTY, centres=centres, watch=partial(answered, asked)) is None


def test_rows_that_cannot_be_compared_are_refused() -> None:
    features, labels, held_out = labelled_table(80)
    with pytest.raises(UsageError, match="4 penalties and no held-out samples to choose one"):
        found((features, labels, torch.zeros_like(held_out)))
    with pytest.raises(UsageError, match="must be above 0 and different, at least one"):
        found((features, labels, held_out), penalties=[0.1, 0.1])


def test_gradients_reach_the_features() -> None:
    features, labels, held_out = labelled_table(200)
    head = KernelHead(features.shape[1], CLASSES)
    take(head, found((features, labels, held_out)))
    some = features[:8].clone().requires_grad_()
    functional.cross_entropy(head(some), labels[:8]).backward()
    assert some.grad is not None and bool(some.grad.isfinite().all()) and bool(some.grad.any())


def test_a_subset_has_few_held_out_rows_where_even_steps_meet_none() -> None:
    count = 20_000
    samples = torch.arange(count)
    held_out = samples % 10 == 9
    rows = AllRows(samples % CLASSES, held_out, samples, torch.ones(count), own=samples)
    part = rows.part(1_500)
    assert 100 < int((part & held_out).sum()) < 200 and int(part.sum()) < 1_700
