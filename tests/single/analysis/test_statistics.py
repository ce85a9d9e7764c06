from __future__ import annotations

import math

import pytest

from analysis.sweeps.statistics import (
    NOTHING,
    Interval,
    joined,
    mean_interval,
    paired_difference,
    paired_ratio,
    shown,
    signed_points,
    time_saved,
    within,
)
from hvfreeze.report.tables import factor, percent


def test_the_interval_of_three_values_uses_students_factor() -> None:
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - found.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


@pytest.mark.parametrize(
    ("ends", "as_ratio", "expected"),
    [
        ((10.0, 10.0), False, (7.0, 13.0)),
        ((6.0, 14.0), False, (5.0, 15.0)),
        ((10.0, 14.0), False, (7.0, 15.0)),
        ((10.0 / 2, 20.0), True, (10 * math.exp(-math.hypot(math.log(0.7), math.log(2))), None)),
    ],
)
def test_an_error_of_another_kind_widens_an_interval_on_its_own_side(
    ends: tuple[float, float], as_ratio: bool, expected: tuple[float, float | None]
) -> None:
    found = joined(Interval(10.0, 7.0, 13.0, 5), *ends, as_ratio=as_ratio)
    assert (found.mean, found.n, found.low) == (10.0, 5, pytest.approx(expected[0]))
    assert found.high == pytest.approx(expected[1]) if expected[1] else found.high > 20.0


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    assert mean_interval([0.5]).mean == 0.5
    assert math.isnan(mean_interval([0.5]).low)
    assert mean_interval([]) == NOTHING
    assert shown(NOTHING, percent) == "not measured"


def test_differences_are_taken_within_a_seed_so_that_what_seeds_share_cancels() -> None:
    theirs = {0: 0.5, 1: 0.7, 2: 0.9}
    found = paired_difference({seed: value + 0.01 for seed, value in theirs.items()}, theirs)
    assert found.mean == pytest.approx(0.01)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-12)


def test_seeds_that_only_one_side_has_do_not_count() -> None:
    assert paired_difference({0: 2.0, 7: 100.0}, {0: 1.0, 1: 50.0}).mean == 1.0
    assert paired_ratio({3: 1.0}, {4: 1.0}).n == 0


def test_a_speed_up_of_two_and_one_of_a_half_average_to_no_gain() -> None:
    found = paired_ratio({0: 2.0, 1: 1.0}, {0: 1.0, 1: 2.0})
    assert found.mean == pytest.approx(1.0)
    assert found.low * found.high == pytest.approx(1.0)


def test_time_saved_is_not_the_speed_up_minus_one() -> None:
    saved = time_saved(mean_interval([1.25]))
    assert saved.mean == pytest.approx(0.2)
    assert time_saved(mean_interval([0.5])).mean == -1.0


def test_the_interval_of_a_share_ends_where_shares_end_and_an_unknown_end_stays_unknown() -> None:
    wide = mean_interval([0.0, 0.5, 1.0])
    assert wide.low < 0 and wide.high > 1
    share = within(wide, 0, 1)
    assert (share.mean, share.low, share.high, share.n) == (0.5, 0, 1, 3)
    assert within(wide, 0).high == wide.high
    assert math.isnan(within(mean_interval([0.5]), 0, 1).low)


def test_a_number_is_shown_with_its_spread_and_n() -> None:
    assert shown(mean_interval([1.0, 2.0, 3.0]), factor, count=True) == "2.00x (-0.48 to 4.48, n = 3)"
    assert shown(mean_interval([2.0]), factor) == "2.00x"
    assert signed_points(-0.0581) == "-5.8 points"
