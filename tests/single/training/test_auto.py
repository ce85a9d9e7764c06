"""What --freeze auto decides, by what its verbs return: the recipe runs on verbs that only say what was asked."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from hvfreeze.config.tree import from_dict
from hvfreeze.training import auto as module
from hvfreeze.training.auto import Plan, auto
from hvfreeze.training.budget import Work
from hvfreeze.training.evaluation import Score
from hvfreeze.training.verbs import Tuned

EPOCH, SOLVE = 100.0, 50.0
FAR, NEAR = (1.0, 0.7), (1.0, 1.1)
"""Losses of the probe before and after a trial."""


class Told:
    """Verbs that write down what they are asked, and return what a test says."""

    def __init__(self, *, epochs: float, probes: tuple[float, ...], scores: tuple[float, ...], **settings: Any) -> None:
        self.settings = from_dict({"freeze": "auto", "weights": "some.pt", **settings})
        self.asked: list[Any] = []
        self.losses, self.scores, self.failing = list(probes), list(scores), set[int]()
        self.head = Score(0.1, 0.9)
        self.limit = epochs * EPOCH
        table = SimpleNamespace(solve=SOLVE, probe=1.0, held_out=1.0, step=lambda batch: 4.0 * batch)
        self.budget = SimpleNamespace(work=table, left=lambda: self.limit)

    def tune(self, settings: Any, *, steps: int | None = None, work: float = 0.0, **rest: Any) -> Tuned:
        number = sum(1 for entry in self.asked if entry[0] in ("trial", "round"))
        self.limit -= work if steps is None else 20.0
        self.asked.append(("trial", steps) if steps is not None else ("round", round(work / EPOCH, 1)))
        return Tuned(steps or 7, 1, number not in self.failing)

    def probe(self, *_: Any, is_tuned: bool = True) -> float:
        # The pretrained network has statistics of its own.
        assert is_tuned == any(entry[0] in ("trial", "round") for entry in self.asked)
        return self.losses.pop(0)

    def held_out(self, _: Any) -> Score:
        wrong = self.scores.pop(0)
        return Score(wrong, 1 - wrong)

    def solve(self, _: Any, *, is_tuned: bool = False) -> Score:
        self.asked.append(("solve", is_tuned))
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
        pass


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
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> list[Any]:
    """What the recipe asks of its verbs."""
    run: Any = Told(epochs=epochs, probes=probes, scores=scores, **settings)
    run.failing, run.head = {failing}, Score(head, 1 - head)
    plan = Plan(
        solving=run.settings,
        tuning=run.settings,
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
    return list(run.asked)


ALONE = [("solve", False), ("finish", "head")]


def test_a_head_alone_where_there_is_no_room_or_the_trial_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided((), has_room=False, monkeypatch=monkeypatch) == ALONE
    back = [("trial", 20), ("restore", "kept"), *ALONE]
    assert decided(NEAR, monkeypatch=monkeypatch) == back
    assert decided((1.0, 0.9), monkeypatch=monkeypatch) == back, "too little"
    assert decided((1.0,), failing=0, monkeypatch=monkeypatch) == back, "NaN"


def test_rounds_get_longer_while_they_pay_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = decided((*FAR, 0.3, 0.1), (0.4, 0.2, 0.1), epochs=30.0, monkeypatch=monkeypatch, head=0.01)
    rounds = [entry[1] for entry in longer if entry[0] == "round"]
    assert rounds[:2] == [3.0, 6.0] and 20.0 < rounds[2] < 21.0, "the last one takes what is left"
    assert longer[-2:] == [("solve", True), ("finish", "head")]


def test_it_stops_where_a_round_gains_little_or_little_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    little = decided((*FAR, 0.6), (0.1,), monkeypatch=monkeypatch)
    assert little == [("trial", 20), ("round", 3.0), ("solve", True), ("finish", "head")]
    good = decided(FAR, (0.01,), head=0.005, monkeypatch=monkeypatch)
    assert good == little, "no probe is needed"


def test_the_network_is_kept_where_no_head_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decided(FAR, (0.05,), head=0.06, monkeypatch=monkeypatch)
    assert found[2:] == [("solve", True), ("restore", "kept"), ("finish", "network")]
    lost = decided((*FAR, 0.6), (math.nan,), monkeypatch=monkeypatch)
    assert lost[2:] == [("solve", True), ("finish", "head")], "NaN is worse than any loss"


@pytest.mark.parametrize(("scores", "failing", "probes"), [((0.1, 0.2), None, (0.3,)), ((0.1,), 2, (0.3,))])
def test_a_round_that_harms_is_reverted(
    scores: tuple[float, ...], failing: int | None, probes: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = decided((*FAR, *probes), scores, failing=failing, epochs=30.0, monkeypatch=monkeypatch)
    assert found[2:5] == [("round", 6.0), ("restore", "kept"), ("solve", True)]


def test_the_first_round_of_many_samples_is_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    pays = decided((1.0, 0.71), (0.15,), many=True, monkeypatch=monkeypatch)
    assert pays == [("round", 3.0), ("solve", True), ("finish", "head")], "and no longer round follows"
    back = decided((1.0, 0.9), (0.15,), many=True, monkeypatch=monkeypatch)
    assert back == [("round", 3.0), ("restore", "kept"), *ALONE]


def test_little_time_is_fine_tuned_where_a_trial_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decided(FAR, (0.2,), epochs=1.0, monkeypatch=monkeypatch)
    assert [entry[0] for entry in found] == ["trial", "round", "finish"] and found[-1] == ("finish", "network")


def test_parts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decided((*FAR, 0.6), (0.1,), auto_without="last-solve", monkeypatch=monkeypatch)
    assert found == [("trial", 20), ("round", 3.0), ("finish", "network")]
    found = decided((), auto_without="guard", epochs=4.0, monkeypatch=monkeypatch)
    assert found == [("round", 3.5), ("solve", True), ("finish", "head")]
    found = decided((), (0.1,), pretrained=False, epochs=4.0, monkeypatch=monkeypatch)
    assert [entry[0] for entry in found] == ["round", "solve", "finish"], "nothing is tried on random weights"


def test_a_loss_that_is_not_finite_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided((1.0, math.inf), monkeypatch=monkeypatch)[-2:] == ALONE


def test_a_table_of_work_is_what_the_recipe_reads() -> None:
    assert {"solve", "probe", "held_out", "step"} <= set(dir(Work()))
