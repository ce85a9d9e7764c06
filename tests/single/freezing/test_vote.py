"""The vote's arithmetic: quorum, ties, weights; `test_properties` has the order of ranks and the scale of weights."""

from __future__ import annotations

import math

import pytest

from hvfreeze.freezing.vote import WEIGHT_STEPS, count, deepest_supported, explain, fixed_point, usable_weight


def tally_of(proposals: list[int], weights: list[float], *, deepest: int = 5) -> list[int]:
    return count(proposals, [fixed_point(weight, max(weights)) for weight in weights], deepest=deepest)


def outcome(proposals: list[int], weights: list[float], *, quorum: float = 0.5, cut: int = 0) -> int:
    return deepest_supported(tally_of(proposals, weights), quorum=quorum, cut=cut)


@pytest.mark.parametrize(
    ("proposals", "weights", "quorum", "cut", "expected"),
    [
        ([0, 1], [1, 1], 0.5, 0, 1),  # equality freezes
        ([0, 1], [1, 1], 0.51, 0, 0),
        ([3, 2, 1], [1, 1, 1], 0.5, 0, 2),
        ([3, 2, 1], [1, 1, 1], 1.0, 0, 1),
        ([3, 0, 0], [2, 1, 1], 0.5, 0, 3),
        ([2, 2], [0, 0], 0.5, 1, 1),  # no weight leaves the cut
        ([0, 0], [1, 1], 0.5, 2, 0),  # thawed
        ([0, 2], [1, 1], 0.5, 2, 2),  # half of the weight keeps it
        ([1] + [0] * 9, [1] * 10, 0.1, 0, 1),  # a tenth is a tenth, though not in binary
    ],
)
def test_the_new_cut_is_the_deepest_that_reaches_the_quorum(
    proposals: list[int], weights: list[float], quorum: float, cut: int, expected: int
) -> None:
    assert outcome(proposals, weights, quorum=quorum, cut=cut) == expected


@pytest.mark.parametrize(
    ("weight", "counts", "why"),
    [(math.nan, 0.0, "NaN or infinite"), (math.inf, 0.0, "NaN or infinite"), (-1.0, 0.0, "negative"), (2.5, 2.5, "")],
)
def test_an_unusable_weight_counts_zero_and_says_why(weight: float, counts: float, why: str) -> None:
    value, reason = usable_weight(weight)
    assert value == counts
    assert why in reason and bool(why) == bool(reason)


def test_weights_are_multiples_of_the_step_of_the_largest() -> None:
    assert fixed_point(7.0, 7.0) == WEIGHT_STEPS
    assert fixed_point(1.0, 3.0) == round(WEIGHT_STEPS / 3)
    assert fixed_point(0.0, 0.0) == 0


def test_a_person_can_read_why() -> None:
    tally = tally_of([1, 0, 0], [1, 1, 1])
    assert explain(tally, quorum=0.5, cut_before=0, cut_after=0) == "cut 1 has 0.333 of the weight, quorum 0.5"
    assert explain(tally, quorum=0.5, cut_before=5, cut_after=5) == "all blocks except the head are frozen"
    assert explain(tally, quorum=0.5, cut_before=2, cut_after=0) == "cut 1 has only 0.333 of the weight, quorum 0.5"
    assert "all weights are 0" in explain([0, 0], quorum=0.5, cut_before=0, cut_after=0)
