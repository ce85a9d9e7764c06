from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from analysis.benchmarks.contest import Duel, OutOfTimeError, Pace, Side, hold
from analysis.benchmarks.judging import bootstrap_interval, is_narrow, judge, with_slack
from analysis.benchmarks.rows.exchange import row_of
from tests.single.analysis.bench_clock import Clock, make_row

QUIET = Pace(cap_seconds=5)


class Alone:
    """One rank; `delays` are the seconds of further ranks."""

    def __init__(self, slower_by: Sequence[float] = ()) -> None:
        self.slower_by = slower_by
        self.modes: list[str] = []

    def use(self, mode: str) -> None:
        self.modes.append(mode)

    def barrier(self) -> None:
        pass

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values), *([value + more for value in values] for more in self.slower_by)]

    def agree(self, value: float) -> float:
        return value


def duel(**changes: Any) -> Duel:
    options: dict[str, Any] = {"name": "a", "ours": "ours", "reference": "theirs", "bound": 1.02, "what": "words"}
    return Duel(**(options | changes))


def test_the_interval_is_of_the_median_a_point_for_equal_ratios_and_narrower_with_more_pairs() -> None:
    assert bootstrap_interval([1.25] * 10) == (1.25, 1.25)
    assert bootstrap_interval([1.0] * 30 + [50.0])[1] == 1.0
    ratios = 1 + 0.05 * np.random.default_rng(2).standard_normal(400)
    few, many = (np.diff(bootstrap_interval(ratios[:n]))[0] for n in (10, 400))
    assert many < few / 3


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    intervals = [bootstrap_interval(1 + 0.1 * random.standard_normal(25)) for _ in range(200)]
    covered = sum(low <= 1.0 <= high for low, high in intervals)
    assert 180 <= covered <= 200


@pytest.mark.parametrize(
    ("ratios", "ok"),
    [
        ([1.0] * 9, True),
        ([1.02] * 9, True),
        ([1.0201] * 9, False),
        ([1.015, 1.035] * 9, True),
        ([0.5, 1.0, 1.5], False),
    ],
    ids=["below", "equal", "above", "interval reaches the bound", "too wide to say"],
)
def test_a_row_is_ok_when_its_narrow_interval_reaches_the_bound(ratios: list[float], ok: bool) -> None:
    assert judge("a", ratios, bound=1.02, what="").ok is ok


def test_an_interval_of_six_percent_is_narrow_and_a_wider_one_is_not() -> None:
    assert is_narrow(make_row(ratio=2.0, low=1.9, high=2.019))
    assert not is_narrow(make_row(ratio=2.0, low=1.9, high=2.03))


def test_slack_counts_for_short_references_only() -> None:
    assert with_slack(1.05, slack_seconds=0.3e-3, reference_seconds=6e-3) == pytest.approx(1.05)
    assert with_slack(1.05, slack_seconds=0.3e-3, reference_seconds=60e-3) == 1.05
    assert with_slack(1.05, slack_seconds=0.3e-3, reference_seconds=1e-3) == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("seconds", "slower_by", "references", "ratio", "said"),
    [
        ({"ours": 0.03, "theirs": 0.02}, (), "theirs", 1.5, "30.00 ms against 20.00 ms"),
        ({"ours": 0.02, "theirs": 0.01}, (0.02,), "theirs", 0.04 / 0.03, "40.00 ms against 30.00 ms"),
        ({"ours": 0.3, "slow": 0.6, "fast": 0.2}, (), ("slow", "fast"), 1.5, "300.00 ms against 200.00 ms"),
    ],
    ids=["two sides", "on its slowest rank", "the fastest of several references"],
)
def test_a_contest_finds_the_ratio(
    seconds: dict[str, float], slower_by: Sequence[float], references: Any, ratio: float, said: str
) -> None:
    clock = Clock()
    sides = [Side(name, clock.work(each)) for name, each in seconds.items()]
    (row,) = hold(Alone(slower_by), sides, [duel(reference=references)], pace=QUIET, clock=clock)
    assert (row.ratio, row.ok) == (pytest.approx(ratio), False)
    assert said in row.what


def test_drift_cancels_because_sides_take_turns() -> None:
    clock = Clock()

    def drifting(seconds: float) -> Callable[[], float]:
        return lambda: clock.work(seconds * (1 + clock.now))()

    sides = [Side("ours", drifting(0.01)), Side("theirs", drifting(0.01))]
    (row,) = hold(Alone(), sides, [duel()], pace=QUIET, clock=clock)
    assert clock.now > 0.5
    assert row.low < 1.0 < row.high


def test_a_noisy_contest_goes_on_until_its_interval_is_narrow() -> None:
    clock = Clock()
    sides = [Side("ours", clock.work(0.3, noise=0.05)), Side("theirs", clock.work(0.3, noise=0.05))]
    (row,) = hold(Alone(), sides, [duel()], pace=Pace(cap_seconds=1000), clock=clock)
    assert row.n > QUIET.min_pairs
    assert is_narrow(row)


def test_the_time_cap_ends_a_contest_that_settles_nothing_and_says_so() -> None:
    clock = Clock()
    sides = [Side("ours", clock.work(0.3, noise=0.3)), Side("theirs", clock.work(0.3, noise=0.3))]
    (row,) = hold(Alone(), sides, [duel(bound=1.0)], pace=Pace(cap_seconds=4), clock=clock)
    assert clock.now < 8
    assert not row.ok
    assert row.what.endswith("the time cap ended it")


def test_no_contest_begins_when_the_time_for_all_is_over() -> None:
    clock = Clock()
    sides = [Side("ours", clock.work(0.03)), Side("theirs", clock.work(0.02))]
    pace = replace(QUIET, until=0.01)
    assert len(hold(Alone(), sides, [duel()], pace=pace, clock=clock)) == 1
    before = clock.now
    with pytest.raises(OutOfTimeError):
        hold(Alone(), sides, [duel()], pace=pace, clock=clock)
    assert clock.now == before


def test_horovod_is_set_up_anew_for_sides_that_need_it_so() -> None:
    clock, ranks = Clock(), Alone()
    sides = [Side("ours", clock.work(0.1)), Side("theirs", clock.work(0.1), "fused")]
    hold(ranks, sides, [duel()], pace=QUIET, clock=clock)
    assert ranks.modes[:4] == ["unfused", "fused", "fused", "unfused"]


def test_sides_that_compute_something_else_are_refused() -> None:
    clock = Clock()
    sides = [Side("ours", clock.work(0.1, value=2.3)), Side("theirs", clock.work(0.1, value=2.4))]
    with pytest.raises(ValueError, match="do not compute the same"):
        hold(Alone(), sides, [duel()], pace=QUIET, clock=clock)
    hold(Alone(), sides, [duel(alike=False)], pace=QUIET, clock=clock)


@pytest.mark.parametrize("off", [0.5, 2.0])
def test_bytes_must_be_exact_also_when_there_are_too_few(off: float) -> None:
    assert row_of({0: 1.0, 1: 1.0}).ok
    row = row_of({0: 1.0, 1: off, 2: 1.0})
    assert (row.ok, row.ratio) == (False, off)
