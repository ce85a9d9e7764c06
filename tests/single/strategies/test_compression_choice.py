"""The trial of gradient compressions: its order, its choice, its state, and what the log says."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hvfreeze.comm.world import SoloWorld
from hvfreeze.strategies.compression_choice import CANDIDATES, ROUNDS, TRIED_STEPS, CompressionChoice, Trial


def in_rounds(taken: dict[str, list[float]]) -> tuple[str, list[str]]:
    """Return the choice if steps take these seconds in each round, and the order of the trial."""
    trial, met = Trial(list(taken)), []
    while not trial.over:
        name = trial.now
        trial.add(taken[name][met.count(name)], 0.0)
        met.append(name)
    return trial.now, met


@pytest.mark.parametrize(
    ("taken", "kept"),
    [
        ({"a": 1.0, "b": 0.97, "c": 0.96}, "a"),
        # One that saves nothing over the one before it does not keep the next from being met.
        ({"a": 1.0, "b": 1.5, "c": 0.6, "d": 0.55}, "d"),
        ({"a": 1.0, "b": 1.0, "c": 0.6, "d": 0.58}, "c"),
        ({"a": 1.0, "b": 0.9, "c": 0.88}, "b"),
    ],
)
def test_what_changes_more_is_kept_where_it_makes_steps_shorter(taken: dict[str, float], kept: str) -> None:
    assert in_rounds({name: [seconds] * ROUNDS for name, seconds in taken.items()})[0] == kept


@pytest.mark.parametrize("disturbed", range(ROUNDS))
def test_one_disturbed_round_decides_nothing(disturbed: int) -> None:
    taken = {"a": [1.0] * ROUNDS, "b": [0.7] * ROUNDS, "c": [0.95] * ROUNDS}
    taken["b"][disturbed] = 1.3
    assert in_rounds(taken)[0] == "b"


def test_every_other_round_goes_backwards() -> None:
    taken = {"a": [1.0] * ROUNDS, "b": [0.7] * ROUNDS, "c": [0.75] * ROUNDS}
    assert in_rounds(taken) == ("b", ["a", "b", "c", "c", "b", "a", "a", "b", "c"])


def test_what_takes_far_longer_leaves_after_a_round() -> None:
    assert in_rounds({"a": [9.0], "b": [1.0] * ROUNDS, "c": [1.1] * ROUNDS}) == (
        "b",
        ["a", "b", "c", "c", "b", "b", "c"],
    )
    assert in_rounds({"a": [9.0], "b": [1.0]}) == ("b", ["a", "b"])


@pytest.mark.parametrize("made", [0, 2, 4, 8])
def test_a_trial_goes_on_from_its_state(made: int) -> None:
    taken, trials = {"a": 0.6, "b": 0.9, "c": 0.5}, [Trial(["a", "b", "c"])]
    for _ in range(made):
        trials[0].add(taken[trials[0].now], 0.1)
    trials.append(Trial(**json.loads(json.dumps(trials[0].state_dict()))))
    met: list[list[str]] = [[], []]
    for trial, names in zip(trials, met, strict=True):
        while not trial.over:
            names.append(trial.now)
            trial.add(taken[trial.now], 0.1)
    assert met[0] == met[1] and trials[0].medians() == trials[1].medians()
    assert [trial.now for trial in trials] == ["c", "c"]


class Clock:
    """Seconds by phase, to which each step adds what it takes with the reducer's compression."""

    def __init__(self) -> None:
        self.seconds = {"backward": 0.0, "allreduce": 0.0}

    def read(self) -> dict[str, float]:
        return dict(self.seconds)


class TwoRanks(SoloWorld):
    """This rank and one that is like it, but waits less, and computes other bits where that is said."""

    size = 2
    alike = True

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        if name == "exchange.tried":
            return [value, [(step, 0.8 * waiting) for step, waiting in value]]
        if name == "gradients.low-rank.probes" and not self.alike:
            return [value, {key: digest[::-1] for key, digest in value.items()}]
        return [value, value]


WAITING = {"none": 0.9, "fp16": 0.5, "powersgd:32": 0.2, "powersgd:16": 0.1}
"""Seconds for which a step of one second waits with each compression."""


class Job:
    """Steps of a reducer of one large matrix, with its log and the compression in use."""

    def __init__(self, asked: str = "auto", *, alike: bool = True) -> None:
        self.said: list[str] = []
        self.clock: Any = Clock()
        self.world = TwoRanks()
        self.world.alike = alike
        self.reducer: Any = SimpleNamespace(
            carried=[(f"weight{i}", nn.Parameter(torch.zeros(512, 2304))) for i in range(3)],
            compression="none" if asked == "auto" else asked,
            uncompressed_steps=10,
            steps=0,
            compress=self.compress,
        )
        self.used: list[str] = []
        self.asked = asked
        self.choice = self.new_choice()

    def new_choice(self) -> CompressionChoice:
        return CompressionChoice(
            self.reducer, self.clock, self.world, asked=self.asked, accumulate=1, say=self.said.append
        )

    def compress(self, compression: str) -> None:
        self.reducer.compression = compression
        self.used.append(compression)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.clock.seconds["backward"] += 1.0
            self.clock.seconds["allreduce"] += WAITING[self.reducer.compression]
            self.reducer.steps += 1
            self.choice.after_step()


def test_auto_keeps_the_fastest_and_says_what_was_measured() -> None:
    job = Job()
    job.go(10)
    assert job.used == [] and job.said == []
    job.go(TRIED_STEPS * ROUNDS * len(CANDIDATES))
    assert job.reducer.compression == "powersgd:16" and set(job.used) == set(CANDIDATES)
    (line,) = job.said
    assert line.startswith("measured step, ms: none 1900 (720 waiting), fp16 1500 (400 waiting), powersgd:32 1200")
    assert line.endswith("compression powersgd:16 is chosen")
    report = job.choice.report()["exchange"]
    assert report["compression"] == "powersgd:16" and report["tried"]["fp16"] == pytest.approx(1.5)


def test_a_compression_that_was_asked_for_stays_and_a_long_exchange_is_told() -> None:
    job = Job("none")
    job.go(10 + TRIED_STEPS * ROUNDS)
    assert job.used == []
    assert job.said[1].startswith("38 % of a step is spent waiting for the exchange; --accumulate 6 would reduce this")


def test_low_rank_is_used_only_where_ranks_compute_alike() -> None:
    job = Job(alike=False)
    job.go(60)
    assert job.reducer.compression == "fp16" and set(job.used) == {"none", "fp16"}
    assert "powersgd is not used" in job.said[0]


def test_after_a_move_of_the_cut_fewer_gradients_need_no_stronger_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    monkeypatch.setitem(WAITING, "powersgd:16", 0.2)
    job.go(80)
    assert job.reducer.compression == "powersgd:32"
    del job.reducer.carried[2]
    job.used.clear()
    job.choice.follow()
    monkeypatch.setitem(WAITING, "none", 0.2)
    job.go(80)
    assert job.reducer.compression == "none" and "powersgd:16" not in job.used
    assert job.said[-1] == "compression changed to none at this cut (was powersgd:32)"
    job.reducer.carried.append(("thawed", nn.Parameter(torch.zeros(512, 2304))))
    job.choice.follow()
    job.go(80)
    assert "powersgd:16" in job.used


@pytest.mark.parametrize("made", [0, 7, 10, 13, 90])
def test_the_seconds_before_a_stop_are_no_part_of_a_step(made: int) -> None:
    job = Job()
    job.go(made)
    state = json.loads(json.dumps(job.choice.state_dict()))
    job.clock.seconds["backward"] += 90.0
    job.choice = job.new_choice()
    job.choice.load_state_dict(state)
    job.go(90)
    assert job.reducer.compression == "powersgd:16"
    assert max(job.choice.report()["exchange"]["tried"].values()) < 2.0


def test_a_checkpoint_of_an_earlier_version_makes_the_choice_again() -> None:
    job = Job()
    job.reducer.steps = 40
    job.choice.load_state_dict(
        {"trial": {"names": ["none", "fp16"], "rounds": [{"none": 1.0}]}, "trying": [], "moved": False}
    )
    job.go(1 + TRIED_STEPS * ROUNDS * len(CANDIDATES))
    assert job.reducer.compression == "powersgd:16"
