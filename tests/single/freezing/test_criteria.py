"""Criteria as pure functions of norms, cut and epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvfreeze.config.sections import CRITERIA as OFFERED
from hvfreeze.config.sections import FreezeConfig
from hvfreeze.freezing.voting.criteria import (
    CRITERIA,
    Evidence,
    geometric,
    gradient_norm,
    interpolated,
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
)


def test_eta_is_the_relative_change_of_the_norm_without_frozen_blocks_and_the_head() -> None:
    etas = rates_of_change(replace(EVIDENCE, cut=1))
    assert etas[0] is None and etas[5] is None
    assert etas[1:5] == pytest.approx((0.1, 0.2, 0.2, 0.07))


@pytest.mark.parametrize(
    ("norms", "cut", "eta_max", "expected"),
    [
        ((9.5, 9.0, 12.0, 8.0, 10.7, 1.0), 0, 0.2, 1),  # the front block changes least
        ((8.5, 9.0, 12.0, 8.0, 10.7, 1.0), 0, 0.2, 0),  # another one does
        ((9.5, 9.0, 12.0, 8.0, 10.7, 1.0), 0, 0.04, 0),  # the guard: still changing too fast
        ((9.5, 9.5, 12.0, 8.0, 10.7, 1.0), 0, 0.2, 1),  # a tie freezes
        ((0.0, 9.9, 12.0, 8.0, 10.7, 1.0), 1, 0.2, 2),  # frozen blocks do not count
        ((0.0, 0.0, 0.0, 0.0, 9.0, 1.0), 4, 0.2, 5),  # the last block before the head
        ((0.0, 0.0, 0.0, 0.0, 0.0, 1.0), 5, 0.2, 5),  # nothing left but the head
    ],
)
def test_gradient_norm_freezes_the_front_block_when_it_changes_least(
    norms: tuple[float, ...], cut: int, eta_max: float, expected: int
) -> None:
    assert gradient_norm(replace(EVIDENCE, norms=norms, cut=cut, eta_max=eta_max)).cut == expected


def test_gradient_norm_waits_for_two_intervals() -> None:
    assert gradient_norm(replace(EVIDENCE, previous_norms=None)).cut == 0


def test_a_block_without_parameters_neither_wins_the_minimum_nor_stops_the_prefix() -> None:
    evidence = replace(EVIDENCE, has_parameters=(True, False, True, True, True, True))
    assert rates_of_change(evidence)[1] is None
    assert gradient_norm(evidence).cut == 2


def test_percentile_freezes_every_block_before_the_first_at_the_median() -> None:
    moving = replace(EVIDENCE, norms=(9.9, 9.8, 13.0, 7.0, 14.0, 1.0), eta_max=1.0)
    assert percentile(moving).cut == 2
    assert percentile(replace(moving, eta_max=0.015)).cut == 1


def test_percentile_of_fewer_than_three_blocks_is_the_minimum_rule() -> None:
    late = replace(EVIDENCE, cut=3, norms=(0, 0, 0, 9.9, 8.0, 1.0))
    assert percentile(late).cut == 4
    assert percentile(replace(late, norms=(0, 0, 0, 8.0, 9.9, 1.0))).cut == 3


def test_percentiles_are_interpolated() -> None:
    assert interpolated([1.0, 2.0, 4.0, 8.0], 50) == 3.0
    assert interpolated([1.0], 50) == 1.0


@pytest.mark.parametrize(("epoch", "cut"), [(0.0, 0), (1.0, 0), (4.5, 1), (4.7, 2), (9.99, 4), (10.0, 5)])
def test_linear_follows_training_after_the_warmup(epoch: float, cut: int) -> None:
    assert linear(replace(EVIDENCE, epoch=epoch)).cut == cut


def test_geometric_is_the_published_schedule() -> None:
    # L = 12, rate 1/3: 4, 7, 9, 10, 11, 11, 12 (PipeTransformer).
    cuts = [
        geometric(replace(EVIDENCE, num_blocks=13, has_parameters=(True,) * 13, epoch=1.0 + e)).cut for e in range(8)
    ]
    assert cuts == [0, 4, 7, 9, 10, 11, 11, 12]


def test_no_schedule_falls_below_the_current_cut() -> None:
    assert linear(replace(EVIDENCE, epoch=0.0, cut=3)).cut == 3
    assert geometric(replace(EVIDENCE, epoch=0.0, cut=3)).cut == 3


def test_the_command_line_offers_every_criterion_and_no_other() -> None:
    assert set(CRITERIA) == set(OFFERED)
    help_of = FreezeConfig.__dataclass_fields__["freeze"].metadata["help"]
    assert all(name in help_of for name in CRITERIA)


@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_needs_exactly_what_it_says_and_stays_in_range(name: str) -> None:
    criterion, late = CRITERIA[name], replace(EVIDENCE, epoch=9.5)
    assert EVIDENCE.cut < criterion.propose(late).cut <= EVIDENCE.deepest
    assert criterion.propose(replace(late, cut=EVIDENCE.deepest)).cut == EVIDENCE.deepest
    blind = criterion.propose(replace(late, norms=None, previous_norms=None)).cut
    assert (blind == EVIDENCE.cut) is criterion.watches_gradients
