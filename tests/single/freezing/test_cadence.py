"""When the cut may be expected to move: certain for schedules, by the past for criteria that look at gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hvfreeze.freezing.cadence import Cadence, epochs_until_move, votes_until_move
from hvfreeze.freezing.criteria import Evidence, Proposer
from hvfreeze.runs.reading import Move

CADENCE = Cadence(interval=5, warmup=10, steps_per_epoch=10, num_epochs=20)
EVIDENCE = Evidence(
    cut=1,
    num_blocks=6,
    has_parameters=(True,) * 6,
    previous_norms=None,
    norms=None,
    epoch=1.0,
    num_epochs=20,
    warmup_epochs=1.0,
    eta_max=0.2,
)
START = Move(0, 0, 0)


@pytest.mark.parametrize("interval", [1, 3, 5, 7])
@pytest.mark.parametrize("warmup", [0, 4, 10])
def test_the_ends_of_intervals_are_found_without_looking_at_every_step(interval: int, warmup: int) -> None:
    cadence = replace(CADENCE, interval=interval, warmup=warmup)
    for after in range(25):
        expected = [step for step in range(after + 1, 41) if cadence.ends_interval(step)]
        assert list(cadence.interval_ends(after, 40)) == expected


def expected(*history: Move, step: int, intervals: int) -> float:
    proposer = Proposer("gradient-norm", history[-1].cut, intervals)
    evidence = replace(EVIDENCE, cut=history[-1].cut, epoch=step / 10)
    return epochs_until_move(CADENCE, proposer, evidence, step=step, history=history)


def test_a_cut_that_moves_at_every_chance_is_expected_to_do_so_again() -> None:
    # Moved in steps 10, 25 and 40: each time with the first vote that has two whole intervals before it.
    eager = [START, Move(1, 10, 1), Move(2, 25, 2), Move(4, 40, 3)]
    assert votes_until_move(CADENCE, eager, step=40) == pytest.approx(5 / 4)
    assert expected(*eager, step=40, intervals=-1) == pytest.approx(1.5 + 0.25 * 0.5)


def test_a_cut_that_stays_is_expected_to_stay_longer_and_longer() -> None:
    stays = [START, Move(1, 10, 1)]
    quiet = [expected(*stays, step=step, intervals=step // 5 - 3) for step in (25, 45, 65, 95)]
    assert quiet == sorted(quiet) and quiet[0] < 1.5 < 4 < quiet[-1], quiet


@pytest.mark.parametrize("name", ["gradient-norm", "linear"])
def test_the_deepest_cut_does_not_move(name: str) -> None:
    proposer = Proposer(name, 5, 9)
    evidence = replace(EVIDENCE, cut=5)
    assert math.isinf(epochs_until_move(CADENCE, proposer, evidence, step=50, history=[START, Move(3, 30, 5)]))


def test_a_schedule_is_known_to_the_step_whatever_its_past() -> None:
    # 5 x (t - 0.05) / 0.95 reaches 2 at t = 0.43, in step 86; the next vote is in step 90.
    history = [START, Move(5, 50, 1)]
    assert epochs_until_move(CADENCE, Proposer("linear", 1), EVIDENCE, step=50, history=history) == pytest.approx(4.0)


def test_after_the_last_vote_nothing_moves() -> None:
    assert math.isinf(expected(START, Move(1, 10, 1), step=196, intervals=30))
