from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvfreeze.comm.world import SoloWorld
from hvfreeze.data.batches import Batch
from hvfreeze.heads.solution import PenaltyTrial, Solution
from hvfreeze.model.blocks import Chain
from hvfreeze.training.auto import goes_on, is_worth_it
from hvfreeze.training.checkpoint_file import packed, unpacked
from hvfreeze.training.evaluation import Score
from hvfreeze.training.guard import Guard, Verdict
from hvfreeze.training.trial import Judge, Seen, Trial


def solution(loss: float, *, converged: bool = True, whole: bool = True) -> Solution:
    trials = (
        PenaltyTrial(1.0, 0.1, 0.99, 1),
        PenaltyTrial(0.1, loss, 0.5, 1, whole),
        PenaltyTrial(0.01, 0.1, 0.99, 1),
    )
    return Solution(0.1, trials, 0.5, 10, 1, 1, 0.1, converged, 0)


def judged(guard: Guard, model: nn.Linear, loss: float, *, stage: int, converged: bool = True) -> bool:
    scores = {"model": Score(1.0, 0.1 * stage)}
    return guard.judge(solution(loss, converged=converged), model, scores, stage=stage).kept


def copy_of(model: nn.Linear) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def test_only_a_better_solution_that_has_converged_is_kept_and_others_are_taken_back_bit_for_bit() -> None:
    guard, model = Guard(), nn.Linear(3, 2)
    first = copy_of(model)
    assert judged(guard, model, 0.5, stage=0, converged=False), "there is nothing better to go back to"
    for loss, converged in ((0.5, True), (0.6, True), (0.1, False)):
        with torch.no_grad():
            model.weight.add_(1.0)
        assert not judged(guard, model, loss, stage=1, converged=converged)
        assert all(torch.equal(mine, then) for mine, then in zip(model.state_dict().values(), first, strict=True))
    with torch.no_grad():
        model.weight.add_(1.0)
    better = copy_of(model)
    assert judged(guard, model, 0.4, stage=2)
    assert all(torch.equal(mine, then) for mine, then in zip(model.state_dict().values(), better, strict=True))
    assert guard.best is not None and guard.best.scores["model"].accuracy == 0.2
    assert [verdict.kept for verdict in guard.verdicts] == [True, False, False, False, True]


def test_a_guard_goes_through_a_checkpoint() -> None:
    guard, model = Guard(), nn.Linear(3, 2)
    empty = Guard()
    empty.load_state_dict(unpacked(packed(guard.state_dict()), name="test"))
    assert empty.best is None and empty.verdicts == []
    judged(guard, model, 0.5, stage=0)
    kept = copy_of(model)
    loaded = Guard()
    loaded.load_state_dict(unpacked(packed(guard.state_dict()), name="test"))
    with torch.no_grad():
        model.weight.zero_()
    assert not judged(loaded, model, 0.5, stage=2)
    assert all(torch.equal(mine, then) for mine, then in zip(model.state_dict().values(), kept, strict=True))
    assert loaded.verdicts[0] == guard.verdicts[0]


@pytest.mark.parametrize(("loss", "kept"), [(0.4, True), (0.5, False), (float("nan"), False)])
def test_a_tuned_model_is_kept_where_its_loss_is_lower_than_the_solutions(loss: float, kept: bool) -> None:
    guard, model = Guard(), nn.Linear(3, 2)
    judged(guard, model, 0.5, stage=0)
    assert guard.judge_tuned(Score(loss, 0.9), stage=1).kept is kept
    assert [verdict.kept for verdict in guard.verdicts] == [True, kept]


@pytest.mark.parametrize(("losses", "kept"), [((0.4, 0.3), 2), ((0.4, 0.45), 1), ((0.6, math.nan), None)])
def test_a_tuned_model_with_its_own_last_layer_ends_the_run_where_no_solution_is_better(
    losses: tuple[float, float], kept: int | None
) -> None:
    guard, model = Guard(), nn.Linear(3, 2)
    judged(guard, model, 0.5, stage=0)
    for number, loss in enumerate(losses, start=1):
        with torch.no_grad():
            model.weight.fill_(float(number))
        guard.note_own(Score(loss, 0.5), model, stage=number)
        judged(guard, model, 0.7, stage=10 + number)
    loaded = Guard()
    loaded.load_state_dict(unpacked(packed(guard.state_dict()), name="test"))
    for each in (guard, loaded):
        best = each.take_own()
        assert (best is None) == (kept is None)
        if best is not None:
            assert best.verdict.stage == kept and bool((best.state["weight"] == kept).all()) and each.best is best
        assert [v.stage for v in each.verdicts if v.kept] == [0, *([] if kept is None else [kept])]


def test_a_verdict_in_words() -> None:
    guard, model = Guard(), nn.Linear(3, 2)
    first, second = (guard.judge(solution(loss), model, {}, stage=stage) for stage, loss in ((0, 0.5), (2, 0.625)))
    assert first.line(None) == "50.00 % of held-out samples right, loss 0.500"
    told = "50.00 % of held-out samples right, loss 0.625; 50.00 %, 0.500 before tuning: taken back"
    assert second.line(first) == told
    assert second.describe() == {"held_out_accuracy": 0.5, "held_out_loss": 0.625, "kept": False, "whole": True}


def test_one_wrong_sample_of_few_is_not_worth_a_try() -> None:
    def found(wrong: float) -> Verdict:
        return Verdict(0, 1 - wrong, 1.0, kept=True)

    assert not is_worth_it(found(1 / 72), 72) and is_worth_it(found(2 / 72), 72)
    assert not is_worth_it(found(2 / 144), 72), "a sample with both of its views"
    assert is_worth_it(found(1 / 2), 2) and is_worth_it(found(1 / 15), 15), "of so few, one is much"
    assert is_worth_it(found(3 / 400), 400) and not is_worth_it(found(4 / 1000), 1000)


def test_no_head_judges_a_sample_whose_other_view_it_was_fitted_to() -> None:
    generator = torch.Generator().manual_seed(0)
    samples, views = torch.arange(60), 2
    features, labels = torch.randn(60, 8, generator=generator), torch.randint(0, 3, (60,), generator=generator)
    seen = Seen(
        features.repeat(views, 1),
        features.repeat(views, 1),
        labels.repeat(views),
        (samples >= 40).repeat(views),
        samples.repeat(views),
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
    chain = Chain.from_modules(model, [("flat", model[0]), ("head", model[1])])
    unused = cast(Any, None)
    judge = Judge(feed=unused, images=unused, held_out=(), seen=(0, 0), pool=1, precision="float32", world=SoloWorld())
    assert judge._solved(chain, seen) > 0.9 * math.log(3), "labels are noise, which none but a twin tells"


class Lagging(Judge):
    """Notes the statistics that features are made with."""

    def _see(self, chain: Chain) -> Seen:
        self.means.append([module.running_mean.tolist() for module in chain.model if hasattr(module, "running_mean")])
        return cast(Seen, None)

    def _solved(self, chain: Chain, seen: Seen) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("learned_from", "counted", "renewed"), [(0, 6, (0, 1)), (1, 6, (1,)), (None, 6, ()), (0, 1, ())]
)
def test_a_trial_is_judged_with_statistics_of_the_blocks_as_they_are(
    learned_from: int | None, counted: int, renewed: tuple[int, ...]
) -> None:
    """After steps at a large rate BatchNorm's running statistics are those of blocks that are gone."""
    generator = torch.Generator().manual_seed(0)
    images = 5 + torch.randn(6, 3, generator=generator)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)).train()
    lag = torch.tensor([-2.0, 0.5, 9.0])
    for norm in (model[0], model[1]):
        norm.running_mean.copy_(lag)
    blocks = [("first", model[0]), ("second", [model[1], model[2]]), ("head", model[3])]
    batch = Batch(np.arange(6), np.zeros(6, dtype=np.int64), torch.zeros(6, dtype=torch.int64), counted=counted)
    feed = SimpleNamespace(
        plan=SimpleNamespace(shards=(0,)),
        rows=6,
        epoch=lambda epoch: [batch],
        images=SimpleNamespace(load=lambda ids, views: images[: len(ids)]),
    )
    judge = Lagging(
        feed=cast(Any, feed),
        images=cast(Any, None),
        held_out=(),
        seen=(6, 6),
        pool=1,
        precision="float32",
        world=SoloWorld(),
        learned_from=learned_from,
    )
    object.__setattr__(judge, "means", [])
    before, random = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    judge.loss(Chain.from_modules(model, blocks))
    first, second = judge.means[0]
    expected = images.mean(0) if 0 in renewed else lag
    assert first == pytest.approx(expected.tolist(), abs=1e-4)
    assert (second == lag.tolist()) == (1 not in renewed)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model[0].training and model[0].momentum == 0.1 and torch.equal(torch.get_rng_state(), random)


def test_tuning_goes_on_where_the_last_one_gained_and_enough_samples_are_wrong() -> None:
    def verdict(loss: float, right: float = 0.9, *, kept: bool = True) -> Verdict:
        return Verdict(2, right, loss, kept)

    before = verdict(0.5)
    assert goes_on(None, before, 400) and goes_on(before, verdict(0.4), 400)
    assert not goes_on(None, verdict(0.01, 0.9975), 400), "an easy task ends after its first tuning"
    assert not goes_on(before, verdict(0.49), 400) and not goes_on(before, verdict(0.4, kept=False), 400)


def test_a_guard_of_an_earlier_source_has_tried_nothing() -> None:
    state = Guard().state_dict() | {"trial": {"before": None, "after": {}, "samples": None}}
    guard = Guard(trial=Trial(before=1.0, after=0.5))
    guard.load_state_dict(state)
    assert guard.trial == Trial() and guard.trial.after is None
