"""What both solvers leave open is chosen by samples that were not fitted, and one damaged sample does not decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.comm.world import SoloWorld
from hvfreeze.errors import NumericsError
from hvfreeze.heads import linear
from hvfreeze.heads.kernel import KernelFit, KernelHead, fit_kernel
from hvfreeze.heads.linear import HeadFit, fit_linear
from hvfreeze.heads.multilevel import take
from hvfreeze.heads.outliers import prepare
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.tasks import SCALES, Classes
from tests.single.heads.table import best_scale

CLASSES = 4
Fit = KernelFit | HeadFit


def compared(rows: RowsInMemory, **options: Any) -> Fit:
    fit = fit_kernel(rows, world=SoloWorld(), memory_bytes=2**30, **options)
    assert fit is not None
    return fit


def separated(rows: RowsInMemory, **options: Any) -> Fit:
    fit = fit_linear(rows, world=SoloWorld(), **options)
    assert fit is not None
    return fit


SOLVERS = pytest.mark.parametrize("solve", [compared, separated])
Solve = Callable[..., Fit]


def answers(fit: Fit, features: Tensor) -> Tensor:
    classes, width = len(fit.weight), features.shape[1]
    head = KernelHead(width, classes) if isinstance(fit, KernelFit) else nn.Linear(width, classes)
    take(head, fit)
    with torch.no_grad():
        logits: Tensor = head(features)
    return logits


def clusters(count: int, *, seed: int, width: int = 60) -> tuple[Tensor, Tensor]:
    """Return points of four classes that overlap, around the same centres whatever the seed."""
    centres = 0.4 * torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=random)
    return centres[labels] + torch.randn(count, width, generator=random), labels


@SOLVERS
def test_a_head_of_few_samples_is_as_sure_as_it_is_right(solve: Solve) -> None:
    features, labels = clusters(40, seed=1)
    fit = solve(RowsInMemory(features, labels, torch.arange(40) % 10 == 0), task=Classes(CLASSES))
    others, truth = clusters(2000, seed=99)
    said = answers(fit, others)
    sure, answered = said.softmax(1).max(1)
    possible = best_scale(said, truth)[1]
    loss, right = float(functional.cross_entropy(said, truth)), float((answered == truth).float().mean())
    assert 0.5 < right < 0.95, "neither hopeless nor easy"
    assert loss < 1.25 * possible, (loss, possible)
    assert float(sure[answered != truth].mean()) < 0.8
    assert abs(float(sure.mean()) - right) < 0.2


def test_a_kernel_head_whose_penalty_is_given_is_as_sure_as_it_is_right() -> None:
    features, labels = clusters(40, seed=1)
    fit = compared(
        RowsInMemory(features, labels, torch.zeros(40, dtype=torch.bool)), task=Classes(CLASSES), penalties=[0.1]
    )
    others, truth = clusters(2000, seed=99)
    said = answers(fit, others)
    assert float(functional.cross_entropy(said, truth)) < 1.1 * best_scale(said, truth)[1]


def test_a_linear_head_of_very_few_samples_uses_what_they_say() -> None:
    count, (others, truth) = 12, clusters(2000, seed=99)
    right = []
    for seed in range(2):
        features, labels = clusters(count, seed=seed)
        fit = separated(RowsInMemory(features, labels, torch.arange(count) % 10 == 0), task=Classes(CLASSES))
        right.append(float((answers(fit, others).argmax(1) == truth).float().mean()))
    # By chance a quarter is right; the strongest penalty leaves only how frequent classes are.
    assert min(right) > 0.35, right


@pytest.mark.parametrize(("solve", "samples"), [(compared, 500), (separated, 40)])
def test_a_head_that_has_nothing_to_go_by_is_unsure(solve: Solve, samples: int) -> None:
    random = torch.Generator().manual_seed(3)
    # Of a network's many features most say the same: a penalty on each is little on what they say together.
    mixing = torch.randn(20, 1000, generator=random)
    features, labels = torch.randn(samples, 20, generator=random) @ mixing, torch.arange(samples) % CLASSES
    fit = solve(RowsInMemory(features, labels, torch.arange(samples) % 10 < 1), task=Classes(CLASSES))
    sure = answers(fit, torch.randn(500, 20, generator=random) @ mixing).softmax(1).amax(1)
    assert float(sure.mean()) < 0.4, float(sure.mean())


def test_few_held_out_samples_that_are_all_right_do_not_make_a_linear_head_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "FEW_ROWS", 0)
    labels = torch.arange(60) % CLASSES
    features = 3 * functional.one_hot(labels, 20) + 0.1 * torch.randn(
        60, 20, generator=torch.Generator().manual_seed(0)
    )
    fit = separated(RowsInMemory(features, labels, torch.arange(60) % 12 < 1), task=Classes(CLASSES))
    sure = answers(fit, features).softmax(1).max(1).values.mean()
    assert fit.penalty > 1e-4 and 0.7 < float(sure) < 0.95, (fit.penalty, float(sure))


@pytest.mark.parametrize(("solve", "damaged"), [(compared, [7, 20]), (separated, [0])])
def test_a_damaged_sample_does_not_decide_for_all_others(solve: Solve, damaged: list[int]) -> None:
    features, labels = clusters(200, seed=5)
    held_out = torch.arange(200) % 10 == 0
    others, truth = clusters(1000, seed=6)
    clean = solve(RowsInMemory(features, labels, held_out), task=Classes(CLASSES))
    assert clean.left_out == () and bool(clean.used.all())
    spoilt = features.clone()
    spoilt[damaged] *= 1e5
    fit = solve(RowsInMemory(spoilt, labels, held_out), task=Classes(CLASSES))
    right = [float((answers(each, others).argmax(1) == truth).double().mean()) for each in (clean, fit)]
    assert right[0] > 0.6 and right[1] > right[0] - 0.03, right
    assert fit.left_out == tuple(damaged) and fit.rows == 200 - len(damaged)
    assert torch.flatten(fit.used.logical_not().nonzero()).tolist() == damaged
    assert fit.summary()["left_out"] == damaged


@SOLVERS
def test_damaged_samples_do_not_hide_each_other(solve: Solve) -> None:
    features, labels = clusters(200, seed=5)
    others, truth = clusters(1000, seed=6)
    # A look finds two orders of size at once, so that these need three.
    for sample, factor in ((3, 1e15), (4, 1e12), (5, 1e9), (6, 1e6), (7, 1e3)):
        features[sample] *= factor
    fit = solve(RowsInMemory(features, labels, torch.arange(200) % 10 == 0), task=Classes(CLASSES))
    assert fit.left_out == (3, 4, 5, 6, 7)
    assert float((answers(fit, others).argmax(1) == truth).double().mean()) > 0.6


def test_all_views_of_a_damaged_sample_are_left_out() -> None:
    features, labels = clusters(80, seed=5)
    rows = RowsInMemory(
        torch.cat([features, features]), labels.repeat(2), torch.arange(160) % 80 < 8, torch.arange(160) % 80
    )
    features_of = next(iter(rows.chunks())).features
    features_of[83] = 1e6
    found = prepare(rows, world=SoloWorld())
    assert found.left_out == (3,) and found.used.logical_not().nonzero().flatten().tolist() == [3, 83]


def test_a_class_of_its_own_far_from_the_others_stays() -> None:
    features, labels = clusters(100, seed=5)
    labels[:3], features[:3] = 0, 1e4 + features[:3]
    labels[3:] = 1 + labels[3:] % 3
    fit = separated(RowsInMemory(features, labels, torch.arange(100) % 10 == 9), task=Classes(CLASSES))
    assert fit.left_out == ()
    assert answers(fit, features)[:3].argmax(1).tolist() == [0, 0, 0]


@SOLVERS
def test_many_damaged_samples_and_numbers_that_are_none_are_refused_and_named(solve: Solve) -> None:
    features, labels = clusters(100, seed=5)
    held_out = torch.arange(100) % 10 == 0
    signs = torch.randn(7, 60, generator=torch.Generator().manual_seed(0))
    features[20:27] += 1e5 * signs
    with pytest.raises(
        NumericsError, match=r"7 of 100 samples are outliers, more than 30 times.*samples 20, 21, 22, 23, 24 and 2 more"
    ):
        solve(RowsInMemory(features, labels, held_out), task=Classes(CLASSES))
    for value in (torch.nan, torch.inf, 1e30):
        features, labels = clusters(100, seed=5)
        features[[41, 60], 2] = value
        with pytest.raises(NumericsError, match=r"1 of 60 features, or .* NaN.*feature 2, in samples 41, 60;"):
            solve(RowsInMemory(features, labels, held_out), task=Classes(CLASSES))


@pytest.mark.parametrize("signal", [0.0, 0.01, 1.0, 100.0])
def test_the_factor_is_the_best_of_all(signal: float) -> None:
    _, truth = clusters(60, seed=5)
    said = signal * (functional.one_hot(truth, CLASSES) + torch.randn(60, CLASSES, generator=torch.manual_seed(0)))
    losses = {scale: float(functional.cross_entropy(scale * said, truth)) for scale in SCALES}
    assert best_scale(said, truth) == pytest.approx(min(losses.items(), key=lambda item: item[1]))
