"""The vote's arithmetic: quorum, ties, weights, order of ranks, scale."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hvfreeze.freezing.vote import WEIGHT_STEPS, ballot, deepest_supported, explain, fixed_point, usable_weight


def tally_of(proposals: list[int], weights: list[float], *, deepest: int = 5) -> list[int]:
    largest = max(weights)
    ballots = [ballot(p, fixed_point(w, largest), deepest=deepest) for p, w in zip(proposals, weights, strict=True)]
    return [sum(column) for column in zip(*ballots, strict=True)]


def outcome(proposals: list[int], weights: list[float], *, quorum: float = 0.5, cut: int = 0) -> int:
    return deepest_supported(tally_of(proposals, weights), quorum=quorum, cut=cut)


@pytest.mark.parametrize(
    ("proposals", "weights", "quorum", "cut", "expected"),
    [
        ([1, 1], [1, 1], 0.5, 0, 1),
        ([0, 1], [1, 1], 0.5, 0, 1),  # equality freezes
        ([0, 1], [1, 1], 0.51, 0, 0),
        ([0, 0, 1], [1, 1, 1], 0.5, 0, 0),
        ([3, 2, 1], [1, 1, 1], 0.5, 0, 2),
        ([3, 2, 1], [1, 1, 1], 1.0, 0, 1),
        ([3, 0, 0], [2, 1, 1], 0.5, 0, 3),
        ([3, 0, 0], [1, 1, 1], 0.3, 0, 3),
        ([2, 2], [0, 0], 0.5, 1, 1),  # no weight leaves the cut
        ([0, 0], [1, 1], 0.5, 2, 0),  # thawed
        ([0, 2], [1, 1], 0.5, 2, 2),  # half of the weight keeps it
        ([1] + [0] * 9, [1] * 10, 0.1, 0, 1),  # a tenth is a tenth, though not in binary
        ([5, 0], [1, 0], 0.5, 0, 5),
    ],
)
def test_the_new_cut_is_the_deepest_that_reaches_the_quorum(
    proposals: list[int], weights: list[float], quorum: float, cut: int, expected: int
) -> None:
    assert outcome(proposals, weights, quorum=quorum, cut=cut) == expected


def test_the_outcome_does_not_depend_on_the_order_of_ranks() -> None:
    ranks = [(3, 0.3), (2, 0.7), (0, 1.9), (4, 0.11)]
    outcomes = {
        tuple(tally_of([p for p, _ in order], [w for _, w in order])) for order in itertools.permutations(ranks)
    }
    assert len(outcomes) == 1


def test_the_outcome_does_not_depend_on_a_scale_of_the_weights_by_a_power_of_two() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        size = generator.randint(1, 6)
        proposals = [generator.randint(0, 5) for _ in range(size)]
        weights = [generator.random() for _ in range(size)]
        scale = 2.0 ** generator.randint(-40, 40)
        assert tally_of(proposals, weights) == tally_of(proposals, [w * scale for w in weights])


def test_many_random_votes_equal_an_exact_reference() -> None:
    generator = random.Random(1)
    for _ in range(20_000):
        size = generator.randint(1, 5)
        proposals = [generator.randint(0, 5) for _ in range(size)]
        units = [generator.randint(0, 4) for _ in range(size)]
        cut = generator.randint(0, 3)
        supported = [
            k for k in range(6) if 2 * sum(u for p, u in zip(proposals, units, strict=True) if p >= k) >= sum(units)
        ]
        expected = max(supported, default=cut) if sum(units) else cut
        # Dividing by 4 is exact, so that the rounding to 2^-20 changes nothing.
        largest = 4 if max(units) in (3, 4) else max(units)
        tally = [
            sum(fixed_point(u, largest) for p, u in zip(proposals, units, strict=True) if p >= k) for k in range(6)
        ]
        assert deepest_supported(tally, quorum=0.5, cut=cut) == expected


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
