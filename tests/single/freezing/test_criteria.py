"""Criteria as pure functions of norms, cut and epoch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hvfreeze.config.freeze import CRITERIA as OFFERED
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.freezing.criteria import (
    CRITERIA,
    Evidence,
    Proposer,
    coherence,
    gain_shares,
    geometric,
    gradient_norm,
    linear,
    percentile,
    rates_of_change,
)

EVIDENCE = Evidence(
    cut=0,
    num_blocks=6,
    has_parameters=(True,) * 6,
    previous_norms=(10.0, 10.0, 10.0, 10.0, 10.0, 10.0),
    norms=(9.5, 9.0, 12.0, 8.0, 10.7, 1.0),
    epoch=2.0,
    num_epochs=10,
    warmup_epochs=1.0,
    eta_max=0.2,
    gains=tuple((0.01 + noise, 0.01 + noise, 1.0 - noise, 2.0 + noise, 3.0, 1.0) for noise in (-0.01, 0.01) * 8),
    peaks=(1.0, 1.0, 1.0, 2.0, 3.0, 1.0),
)


def test_eta_is_the_relative_change_of_the_norm_without_frozen_blocks_and_the_head() -> None:
    etas = rates_of_change(replace(EVIDENCE, cut=1))
    assert etas[0] is None and etas[5] is None
    assert etas[1:5] == pytest.approx((0.1, 0.2, 0.2, 0.07))


@pytest.mark.parametrize(
    ("norms", "cut", "eta_max", "expected"),
    [
        ((9.5, 9.0, 12.0, 8.0, 10.7, 1.0), 0, 0.2, 1),  # the front block changes least
        ((9.5, 9.0, 12.0, 8.0, 10.7, 1.0), 0, 0.04, 0),  # the guard: still changing too fast
        ((9.5, 9.5, 12.0, 8.0, 10.7, 1.0), 0, 0.2, 1),  # a tie freezes
        ((0.0, 9.9, 12.0, 8.0, 10.7, 1.0), 1, 0.2, 2),  # frozen blocks do not count
        ((0.0, 0.0, 0.0, 0.0, 0.0, 1.0), 5, 0.2, 5),  # nothing left but the head
    ],
)
def test_gradient_norm_freezes_the_front_block_when_it_changes_least(
    norms: tuple[float, ...], cut: int, eta_max: float, expected: int
) -> None:
    assert gradient_norm(replace(EVIDENCE, norms=norms, cut=cut, eta_max=eta_max)) == expected


def test_gradient_norm_waits_for_two_intervals() -> None:
    assert gradient_norm(replace(EVIDENCE, previous_norms=None)) == 0


def test_a_block_without_parameters_neither_wins_the_minimum_nor_stops_the_prefix() -> None:
    evidence = replace(EVIDENCE, has_parameters=(True, False, True, True, True, True))
    assert rates_of_change(evidence)[1] is None
    assert gradient_norm(evidence) == 2


def test_percentile_freezes_every_block_before_the_first_at_the_median() -> None:
    moving = replace(EVIDENCE, norms=(9.9, 9.8, 13.0, 7.0, 14.0, 1.0), eta_max=1.0)
    assert percentile(moving) == 2
    assert percentile(replace(moving, eta_max=0.015)) == 1


def test_percentile_of_fewer_than_three_blocks_is_the_minimum_rule() -> None:
    late = replace(EVIDENCE, cut=3, norms=(0, 0, 0, 9.9, 8.0, 1.0))
    assert percentile(late) == 4
    assert percentile(replace(late, norms=(0, 0, 0, 8.0, 9.9, 1.0))) == 3


@pytest.mark.parametrize(("epoch", "cut"), [(0.0, 0), (1.0, 0), (4.5, 1), (4.7, 2), (9.99, 4), (10.0, 5)])
def test_linear_follows_training_after_the_warmup(epoch: float, cut: int) -> None:
    assert linear(replace(EVIDENCE, epoch=epoch)) == cut


def test_geometric_is_the_published_schedule() -> None:
    # L = 12, rate 1/3: 4, 7, 9, 10, 11, 11, 12 (PipeTransformer).
    cuts = [geometric(replace(EVIDENCE, num_blocks=13, has_parameters=(True,) * 13, epoch=1.0 + e)) for e in range(8)]
    assert cuts == [0, 4, 7, 9, 10, 11, 11, 12]


def test_the_command_line_offers_every_criterion_and_no_other() -> None:
    assert set(CRITERIA) == set(OFFERED)
    help_of = FreezeConfig.__dataclass_fields__["freeze"].metadata["help"]
    assert all(name in help_of for name in CRITERIA)


@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_needs_exactly_what_it_says_and_stays_in_range(name: str) -> None:
    criterion, late = CRITERIA[name], replace(EVIDENCE, epoch=9.5)
    assert EVIDENCE.cut < criterion.propose(late) <= EVIDENCE.deepest
    assert criterion.propose(replace(late, cut=EVIDENCE.deepest)) == EVIDENCE.deepest
    blind = criterion.propose(replace(late, norms=None, previous_norms=None, gains=None))
    assert (blind == EVIDENCE.cut) is criterion.watches_gradients


@pytest.mark.parametrize(
    ("changes", "cut"),
    [
        ({}, 2),
        ({"peaks": (1.0, 0.001, 1.0, 2.0, 3.0, 1.0)}, 1),
        ({"peaks": (0.01, 1.0, 1.0, 2.0, 3.0, 1.0)}, 0),
        ({"min_gain": 0.001}, 0),
        ({"work": (1.0, 1.0, 1.0, 1.0, 1.0, 995.0)}, 0),
        ({"cut": 1}, 2),
        ({"has_parameters": (True, True, False, True, True, True)}, 3),
        ({"gains": EVIDENCE.gains[:1]}, 0),  # type: ignore[index]
        ({"gains": tuple((*row[:5], sign * 99.0) for row, sign in zip(EVIDENCE.gains, (1, -1) * 8))}, 0),  # type: ignore[arg-type]
        ({"gains": tuple((math.nan, *row[1:]) for row in EVIDENCE.gains)}, 0),  # type: ignore[union-attr]
        ({"gains": tuple((0.0, *row[1:]) for row in EVIDENCE.gains)}, 0),  # type: ignore[union-attr]
        ({"gains": tuple((row[0], 0.0, *row[2:]) for row in EVIDENCE.gains)}, 1),  # type: ignore[union-attr]
    ],
    ids=(
        "two has-not-learned none-has strict saves-nothing further parameterless one-sample unclear not-finite "
        "not-seen one-seen"
    ).split(),
)
def test_blocks_that_gain_little_for_their_time_are_frozen(changes: dict[str, Any], cut: int) -> None:
    assert coherence(replace(EVIDENCE, **changes)) == cut


def test_a_cut_is_proposed_once_it_was_wanted_twice_and_uncertain_samples_freeze_nothing() -> None:
    proposer = Proposer("coherence", intervals=2)
    assert [proposer.propose(EVIDENCE, 1) for _ in range(2)] == [0, 2]
    wild = tuple((noise, noise, 1.0, 2.0, 3.0, 1.0) for noise in (-2.0, 2.0) * 8)
    assert coherence(replace(EVIDENCE, gains=wild)) == 0, "the mean is small, and not known to be"
    assert gain_shares(EVIDENCE)[3] == pytest.approx(2 / 7, rel=0.01)
    assert math.isnan(gain_shares(replace(EVIDENCE, cut=1))[0]) and gain_shares(replace(EVIDENCE, gains=None)) == ()


def probed(*gains: float) -> tuple[tuple[float, ...], ...]:
    """Return a look that finds these gains, each sure to a hundredth."""
    return tuple(tuple(gain + noise for gain in gains) for noise in (-0.01, 0.01) * 4)


def test_parts_of_frozen_blocks_are_known_by_two_looks_and_ranks_send_equally_many_numbers() -> None:
    frozen, first = replace(EVIDENCE, cut=2), probed(1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    shares = gain_shares(replace(frozen, probes=(first, probed(2.0, 0.0, 0.0, 0.0, 0.0, 0.0))))
    assert shares == pytest.approx((0.75, 0.0, 0.0, 0.0, 0.25, 0.0))
    for unknown in ({"probes": (first,)}, {"probes": ((), ())}):
        assert [math.isnan(share) for share in gain_shares(replace(frozen, **unknown))] == [True] * 2 + [False] * 4
    nothing = [gain_shares(replace(frozen, gains=(), probes=probes)) for probes in ((), ((), ()))]
    assert all(len(shares) == 6 and all(map(math.isnan, shares)) for shares in nothing)


@pytest.mark.parametrize(
    ("probes", "cut"),
    [
        ((), 3),
        ((probed(9, 9, 9, 1, 1, 1),), 3),
        ((probed(9, 9, 9, 1, 1, 1),) * 2, 0),
        ((probed(0, 0, 9, 1, 1, 1),) * 2, 2),
        ((probed(0, 0, 0.1, 1, 1, 1),) * 2, 3),
        ((probed(9, 9, 9, 1, 1, 1), probed(0, 0, 0, 1, 1, 1)), 3),
    ],
    ids=["no-look", "one-look", "all-gain", "the-last-does", "too-little", "once-only"],
)
def test_frozen_blocks_train_again_where_two_looks_find_that_they_gain(probes: Any, cut: int) -> None:
    frozen = replace(EVIDENCE, cut=3, gains=None, probes=probes)
    assert coherence(frozen) == cut
    proposer = Proposer("coherence", cut=3, intervals=0)
    assert proposer.propose(frozen, 1) == cut
