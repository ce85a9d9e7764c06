"""Compressions that are tried: which are, which is kept, and a trial that goes on where it stopped."""

from __future__ import annotations

import json

import pytest

from hvfreeze.ranks.exchange.forecast import CANDIDATES, Forecast, choose, worth_trying
from hvfreeze.strategies.replicas.trial import ROUNDS, TRIED_STEPS, Trial


def follow(trial: Trial, taken: dict[str, float]) -> str:
    while not trial.over:
        trial.add([9.0] + [taken[trial.now]] * (TRIED_STEPS - 1))
    return trial.now


@pytest.mark.parametrize(
    ("taken", "kept", "tried"),
    [
        # Two save next to nothing, and so the fourth is never met.
        ({"a": 1.0, "b": 0.97, "c": 0.96, "d": 0.1}, "a", 3),
        ({"a": 1.0, "b": 1.5, "c": 1.2, "d": 0.1}, "a", 3),
        # One that saves nothing over the one before it does not keep the next from being met.
        ({"a": 1.0, "b": 1.5, "c": 0.6, "d": 0.5}, "d", 4),
        ({"a": 1.0, "b": 1.0, "c": 0.6, "d": 0.58, "e": 0.6}, "c", 5),
        ({"a": 1.0, "b": 0.9, "c": 0.88}, "b", 3),
        ({"a": 1.0, "b": 0.9, "c": 0.8}, "c", 3),
    ],
)
def test_what_changes_more_is_kept_where_it_makes_steps_shorter(taken: dict[str, float], kept: str, tried: int) -> None:
    trial = Trial(list(taken))
    assert trial.now == "a" and not trial.over
    assert follow(trial, taken) == kept
    assert trial.medians == dict(list(taken.items())[:tried])


def test_one_disturbed_round_decides_nothing() -> None:
    taken = {"a": [1.0, 1.9, 1.0], "b": [1.0, 1.0, 0.8], "c": [1.2, 0.4, 1.2]}
    trial, met = Trial(list(taken)), dict.fromkeys(taken, 0)
    while not trial.over:
        name = trial.now
        trial.add([taken[name][met[name]]] * TRIED_STEPS)
        met[name] += 1
    assert trial.now == "a" and trial.medians == {"a": 1.0, "b": 1.0, "c": 1.2}
    assert set(met.values()) == {ROUNDS}


def test_what_is_far_longer_is_tried_once() -> None:
    taken, met = {"a": 1.0, "b": 0.7, "c": 0.75, "d": 0.9}, []
    trial = Trial(list(taken))
    while not trial.over:
        met.append(trial.now)
        trial.add([taken[trial.now]] * TRIED_STEPS)
    assert met == ["a", "b", "c", "d", "b", "c", "b", "c"] and trial.now == "b"


def test_one_alone_is_not_tried() -> None:
    trial = Trial(["a"])
    assert trial.over and trial.now == "a" and not trial.medians


@pytest.mark.parametrize("rounds", range(8))
def test_a_trial_goes_on_from_its_state(rounds: int) -> None:
    taken = {"a": 0.6, "b": 0.9, "c": 0.5}
    trial = Trial(list(taken))
    for _ in range(rounds):
        trial.add([taken[trial.now]] * TRIED_STEPS)
    again = Trial(**json.loads(json.dumps(trial.state_dict())))
    assert (again.now, again.over, dict(again.medians)) == (trial.now, trial.over, dict(trial.medians))
    assert follow(again, taken) == "c"


def test_what_is_forecast_to_be_far_longer_is_not_tried() -> None:
    forecasts = {name: Forecast(1.0, 0.0) for name in CANDIDATES}
    assert worth_trying(forecasts, "none") == CANDIDATES
    forecasts["powersgd:8"] = Forecast(1.6, 0.0)
    assert worth_trying(forecasts, "powersgd:16") == ("powersgd:16", "powersgd:4", "powersgd:2")
    assert worth_trying(forecasts, choose(forecasts))[0] == "none"
    assert worth_trying(forecasts, "powersgd:2") == ("powersgd:2",)
