"""Compressions that are tried: which are, which is kept, and a trial that goes on where it stopped."""

from __future__ import annotations

import json

import pytest

from hvfreeze.comm.compression_cost import CANDIDATES, StepForecast, choose, worth_trying
from hvfreeze.strategies.compression_choice import ROUNDS, TRIED_STEPS, CompressionTrial


def follow(trial: CompressionTrial, taken: dict[str, float]) -> str:
    while not trial.over:
        trial.add([9.0] + [taken[trial.now]] * (TRIED_STEPS - 1))
    return trial.now


@pytest.mark.parametrize(
    ("taken", "kept"),
    [
        ({"a": 1.0, "b": 0.97, "c": 0.96}, "a"),
        ({"a": 1.0, "b": 1.5, "c": 1.2, "d": 1.1}, "a"),
        # One that saves nothing over the one before it does not keep the next from being met.
        ({"a": 1.0, "b": 1.5, "c": 0.6, "d": 0.5}, "d"),
        ({"a": 1.0, "b": 1.0, "c": 0.6, "d": 0.58}, "c"),
        ({"a": 1.0, "b": 0.9, "c": 0.88}, "b"),
        ({"a": 1.0, "b": 0.9, "c": 0.8}, "c"),
    ],
)
def test_what_changes_more_is_kept_where_it_makes_steps_shorter(taken: dict[str, float], kept: str) -> None:
    trial = CompressionTrial(list(taken))
    assert trial.now == "a" and not trial.over
    assert follow(trial, taken) == kept
    assert trial.medians == taken


def in_rounds(taken: dict[str, list[float]]) -> tuple[str, list[str]]:
    """Return what is kept of compressions that take other seconds in every round, and what was tried, in order."""
    trial, met = CompressionTrial(list(taken)), []
    while not trial.over:
        name = trial.now
        trial.add([9.0] + [taken[name][met.count(name)]] * (TRIED_STEPS - 1))
        met.append(name)
    return trial.now, met


@pytest.mark.parametrize("disturbed", range(ROUNDS))
def test_one_disturbed_round_decides_nothing(disturbed: int) -> None:
    taken = {"a": [1.0] * ROUNDS, "b": [0.7] * ROUNDS, "c": [0.95] * ROUNDS}
    taken["b"][disturbed] = 3.0
    assert in_rounds(taken)[0] == "b"


def test_every_other_round_goes_backwards() -> None:
    taken = {"a": [1.0] * ROUNDS, "b": [0.7] * ROUNDS, "c": [0.75] * ROUNDS}
    assert in_rounds(taken) == ("b", ["a", "b", "c", "c", "b", "a", "a", "b", "c"])


def test_one_alone_is_not_tried() -> None:
    trial = CompressionTrial(["a"])
    assert trial.over and trial.now == "a" and not trial.medians


@pytest.mark.parametrize("rounds", [0, 4, 8])
def test_a_trial_goes_on_from_its_state(rounds: int) -> None:
    taken = {"a": 0.6, "b": 0.9, "c": 0.5}
    trial = CompressionTrial(list(taken))
    for _ in range(rounds):
        trial.add([taken[trial.now]] * TRIED_STEPS)
    again = CompressionTrial(**json.loads(json.dumps(trial.state_dict())))
    assert (again.now, again.over, dict(again.medians)) == (trial.now, trial.over, dict(trial.medians))
    assert follow(again, taken) == "c"


def test_what_is_forecast_to_be_far_longer_is_not_tried() -> None:
    forecasts = {name: StepForecast(1.0, 0.0) for name in CANDIDATES}
    assert worth_trying(forecasts, "none") == CANDIDATES
    forecasts["powersgd:8"] = StepForecast(1.6, 0.0)
    assert worth_trying(forecasts, "powersgd:16") == ("powersgd:16", "powersgd:4", "powersgd:2")
    assert worth_trying(forecasts, choose(forecasts))[0] == "none"
    assert worth_trying(forecasts, "powersgd:2") == ("powersgd:2",)
