"""What --freeze auto decides, by what its verbs return: the recipe runs on verbs that only say what was asked."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvfreeze.config.tree import from_dict
from hvfreeze.tasks import Classes, Numbers
from hvfreeze.training import auto as module
from hvfreeze.training.auto import Plan, auto
from hvfreeze.training.budget import Work
from hvfreeze.training.evaluation import Score
from hvfreeze.training.verbs import FineTuned, Run
from tests.program import succeed, summary_of

EPOCH, HEAD_FIT = 100.0, 50.0
FAR, NEAR = (1.0, 0.7), (1.0, 1.1)
"""Losses of the probe before and after a trial."""


class Told:
    """Verbs that write down what they are asked, and return what a test says."""

    def __init__(self, *, epochs: float, probes: tuple[float, ...], scores: tuple[float, ...], **settings: Any) -> None:
        self.settings = from_dict({"freeze": "auto", "weights": "some.pt", **settings})
        self.asked: list[Any] = []
        self.said: list[str] = []
        self.job = SimpleNamespace(task=Classes(2))
        self.losses, self.scores, self.failing = list(probes), list(scores), set[int]()
        self.head = Score(0.1, 0.9)
        self.limit = epochs * EPOCH
        table = SimpleNamespace(head_fit=HEAD_FIT, probe=1.0, held_out=1.0, step=lambda batch: 4.0 * batch)
        self.budget = SimpleNamespace(work=table, left=lambda: self.limit)

    def fine_tune(self, settings: Any, *, steps: int | None = None, work: float = 0.0, **rest: Any) -> FineTuned:
        number = sum(1 for entry in self.asked if entry[0] in ("trial", "round"))
        self.limit -= work if steps is None else 20.0
        self.asked.append(("trial", steps) if steps is not None else ("round", round(work / EPOCH, 1)))
        return FineTuned(steps or 7, 1, number not in self.failing)

    def probe(self, *_: Any, is_fine_tuned: bool = True) -> float:
        # The pretrained network has statistics of its own.
        assert is_fine_tuned == any(entry[0] in ("trial", "round") for entry in self.asked)
        return self.losses.pop(0)

    def held_out(self, _: Any) -> Score:
        wrong = self.scores.pop(0)
        return Score(wrong, 1 - wrong)

    def fit_head(self, _: Any, *, is_fine_tuned: bool = False) -> Score:
        self.asked.append(("fit_head", is_fine_tuned))
        return self.head

    def finish_with(self, settings: Any = None) -> None:
        self.asked.append(("finish", "head" if settings is None else "network"))

    def restore(self, name: str) -> None:
        self.asked.append(("restore", name))

    def snapshot(self, name: str) -> None:
        pass

    def fit_last_layer(self, *_: Any) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)

    verdict = Run.verdict


def decided(
    probes: tuple[float, ...],
    scores: tuple[float, ...] = (),
    *,
    epochs: float = 16.0,
    many: bool = False,
    has_room: bool = True,
    failing: int | None = None,
    head: float = 0.1,
    pretrained: bool = True,
    said: list[str] | None = None,
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> list[Any]:
    """What the recipe asks of its verbs; `said` gets its log lines."""
    run: Any = Told(epochs=epochs, probes=probes, scores=scores, **settings)
    run.failing, run.head = {failing}, Score(head, 1 - head)
    plan = Plan(
        head_fit=run.settings,
        fine_tuning=run.settings,
        has_default_sgd=True,
        is_pretrained=pretrained,
        has_many=many,
        has_trial=pretrained and not many,
        trial=run.settings,
        trial_steps=20,
        epoch=EPOCH,
        first_round=3 * EPOCH,
        has_room=has_room,
        settings_for=lambda work, warms_up=True: run.settings,
    )
    monkeypatch.setattr(module, "plan_run", lambda _: plan)
    auto(run)
    assert not run.losses and not run.scores, "verbs that were not asked"
    if said is not None:
        said += run.said
    return list(run.asked)


ALONE = [("fit_head", False), ("finish", "head")]


def test_a_head_alone_where_there_is_no_room_or_the_trial_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided((), has_room=False, monkeypatch=monkeypatch) == ALONE
    back = [("trial", 20), ("restore", "kept"), *ALONE]
    assert decided(NEAR, monkeypatch=monkeypatch) == back
    assert decided((1.0, 0.96), monkeypatch=monkeypatch) == back, "too little"
    assert decided((1.0,), failing=0, monkeypatch=monkeypatch) == back, "NaN"


def test_rounds_get_longer_while_they_pay_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = decided((*FAR, 0.3, 0.1), (0.4, 0.2, 0.1), epochs=30.0, monkeypatch=monkeypatch, head=0.01)
    rounds = [entry[1] for entry in longer if entry[0] == "round"]
    assert rounds[:2] == [3.0, 6.0] and 20.0 < rounds[2] < 21.0, "the last one takes what is left"
    assert longer[-2:] == [("fit_head", True), ("finish", "head")]


def test_it_stops_where_a_round_gains_little_or_little_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    little = decided((*FAR, 0.6), (0.1,), monkeypatch=monkeypatch)
    assert little == [("trial", 20), ("round", 3.0), ("fit_head", True), ("finish", "head")]
    good = decided(FAR, (0.01,), head=0.005, monkeypatch=monkeypatch)
    assert good == little, "no probe is needed"


def test_the_network_is_kept_where_no_head_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decided(FAR, (0.05,), head=0.06, monkeypatch=monkeypatch)
    assert found[2:] == [("fit_head", True), ("restore", "kept"), ("finish", "network")]
    lost = decided((*FAR, 0.6), (math.nan,), monkeypatch=monkeypatch)
    assert lost[2:] == [("fit_head", True), ("finish", "head")], "NaN is worse than any loss"


@pytest.mark.parametrize(("scores", "failing", "probes"), [((0.1, 0.2), None, (0.3,)), ((0.1,), 2, (0.3,))])
def test_a_round_that_harms_is_reverted(
    scores: tuple[float, ...], failing: int | None, probes: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = decided((*FAR, *probes), scores, failing=failing, epochs=30.0, monkeypatch=monkeypatch)
    assert found[2:5] == [("round", 6.0), ("restore", "kept"), ("fit_head", True)]


@pytest.mark.parametrize(("samples", "epochs"), [(14_000, 3), (15_000, 4), (60_000, 4)])
def test_many_samples_have_a_longer_first_round_instead_of_a_trial(samples: int, epochs: int) -> None:
    settings = from_dict({"freeze": "auto", "weights": "some.pt"})
    per_rank = samples // 2
    batch = settings.optimizer.batch_size
    deal = SimpleNamespace(batches_per_epoch=per_rank // batch, batch_size=batch, samples=samples)
    context = SimpleNamespace(
        feed=SimpleNamespace(plan=deal), chain=SimpleNamespace(model=torch.nn.Sequential(torch.nn.BatchNorm2d(3)))
    )
    factory = SimpleNamespace(context=context, with_affordable_flips=lambda config: config, can_hold_out=lambda: True)
    work = Work(forward=1e9, rows=per_rank)
    budget = SimpleNamespace(work=work, left=lambda: 1e9, limit=0.0)
    run: Any = SimpleNamespace(settings=settings, budget=budget, job=SimpleNamespace(factory=factory))
    plan = module.plan_run(run)
    assert plan.has_trial == (epochs == 3) and plan.has_many == (epochs == 4)
    assert plan.first_round == epochs * plan.epoch and plan.has_room


def test_batches_that_are_accumulated_count_as_one_step() -> None:
    settings = from_dict({"freeze": "auto", "weights": "some.pt", "accumulate": 10})
    deal = SimpleNamespace(batches_per_epoch=20, batch_size=settings.optimizer.batch_size, samples=4000)
    norm = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    context = SimpleNamespace(feed=SimpleNamespace(plan=deal), chain=SimpleNamespace(model=norm))
    factory = SimpleNamespace(context=context, with_affordable_flips=lambda config: config, can_hold_out=lambda: True)
    budget = SimpleNamespace(work=Work(forward=1e9), left=lambda: 1e9, limit=0.0)
    run: Any = SimpleNamespace(settings=settings, budget=budget, job=SimpleNamespace(factory=factory))
    plan = module.plan_run(run)
    tuned = plan.settings_for(plan.first_round).optimizer
    steps = plan.first_round / budget.work.step(10 * tuned.batch_size)
    assert steps >= module.FIRST_ROUND_STEPS and tuned.lr_warmup == int(0.1 * steps)


def test_with_no_time_left_after_a_trial_that_paid_the_pretrained_blocks_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = decided(FAR, epochs=0.1, monkeypatch=monkeypatch)
    assert [entry[0] for entry in found] == ["trial", "restore", "fit_head", "finish"] and found[-1] == (
        "finish",
        "head",
    )


def test_the_first_round_of_many_samples_is_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    pays = decided((1.0, 0.71), (0.15,), many=True, monkeypatch=monkeypatch)
    assert pays == [("round", 3.0), ("fit_head", True), ("finish", "head")], "and no longer round follows"
    back = [("round", 3.0), ("restore", "kept"), *ALONE]
    assert decided((1.0, 0.96), (0.15,), many=True, monkeypatch=monkeypatch) == back
    assert decided((1.0,), many=True, failing=0, monkeypatch=monkeypatch) == back, "NaN"


def test_little_time_is_fine_tuned_where_a_trial_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decided(FAR, (0.2,), epochs=1.0, monkeypatch=monkeypatch)
    assert [entry[0] for entry in found] == ["trial", "round", "finish"] and found[-1] == ("finish", "network")


def test_parts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decided((*FAR, 0.6), (0.1,), auto_without="last-solve", monkeypatch=monkeypatch)
    assert found == [("trial", 20), ("round", 3.0), ("finish", "network")]
    found = decided((), auto_without="guard", epochs=4.0, monkeypatch=monkeypatch)
    assert found == [("round", 3.5), ("fit_head", True), ("finish", "head")]
    found = decided((), (0.1,), pretrained=False, epochs=4.0, monkeypatch=monkeypatch)
    assert [entry[0] for entry in found] == ["round", "fit_head", "finish"], "nothing is tried on random weights"


def test_a_loss_that_is_not_finite_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided((1.0, math.inf), monkeypatch=monkeypatch)[-2:] == ALONE


def log_of(*losses: Any, **rest: Any) -> list[str]:
    """The log lines of the recipe; see `decided`."""
    said: list[str] = []
    decided(*losses, said=said, **rest)
    return said


def test_the_log_says_what_decides_between_the_network_and_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, tuned, fitted = log_of(FAR, (0.05,), head=0.2, monkeypatch=monkeypatch)
    assert tried.startswith("trial: 20 steps (") and "lr " in tried and "batch size " in tried
    assert tried.endswith("held-out loss 1.000 -> 0.700 (-30 %; fine-tuning needs -5 %)")
    assert tuned.startswith("fine-tuned: 7 steps (") and tuned.endswith("held-out loss 0.050, accuracy 95.0 %")
    numbers = "held-out loss 0.200, accuracy 80.0 %; network: loss 0.050, accuracy 95.0 %"
    assert fitted == f"head fitted: {numbers}; the lower loss decides: keeping the network"
    assert log_of(FAR, (0.05,), head=0.01, monkeypatch=monkeypatch)[-1].endswith("decides: keeping the head")


def test_the_log_says_why_blocks_or_the_network_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, kept, _ = log_of(NEAR, monkeypatch=monkeypatch)
    assert tried.endswith("(+10 %; fine-tuning needs -5 %)") and kept == "=> keeping the pretrained blocks"
    assert log_of((1.0, 0.96), (0.5,), many=True, monkeypatch=monkeypatch)[1].endswith(
        "1.000 -> 0.960 (-4 %; fine-tuning needs -5 %)"
    )
    failed = log_of((), pretrained=False, failing=0, monkeypatch=monkeypatch)
    assert "loss not usable" in failed[0] and failed[1] == "=> keeping the initial blocks"
    last = log_of(FAR, (0.1,), epochs=1.4, monkeypatch=monkeypatch)[-1]
    assert last == "=> keeping the network: too little of the budget is left to fit a head"


@pytest.mark.parametrize(
    ("task", "decides"),
    [
        (Classes(2, metric="macro_f1"), ("macro F1", False)),
        (Numbers(1), ("R^2", False)),
        (Numbers(1, metric="mae"), ("mean absolute error", True)),
    ],
)
def test_a_metric_that_decides_is_named(task: Any, decides: tuple[str, bool]) -> None:
    assert task.decisive == decides


def test_epochs_of_few_samples_are_those_asked_for_where_there_is_no_trial(tmp_path: Path) -> None:
    flags = "--train-samples 60 --model tests.kept.small_model:small --batch-size 20 --epochs 6 --threads 1"
    succeed("auto", "digits", *flags.split(), "--run-dir", str(tmp_path / "run"))
    steps = summary_of(tmp_path / "run")["steps"]
    assert 12 <= steps <= 18, "6 epochs of 60 samples are 18 steps, of which the head takes some"
