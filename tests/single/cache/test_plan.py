from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import Disk
from hvfreeze.cache.planning import (
    PROBE_BYTES,
    PROBE_SECONDS,
    CostMeasurement,
    Plan,
    Rates,
    make_plan,
    measure_directory,
)
from hvfreeze.prefix import cache_decision

GIB = 1 << 30

FAST = {"read_cold": 1e-9, "read_warm": 1e-10, "read_cpu": 1e-10, "write": 2e-9, "write_cpu": 1e-9, "hash": 1e-9}
RATES = Rates(**FAST, free_bytes=100 * GIB, filesystem="node:1")

# 100 steps an epoch of 100 ms each, 60 ms of them for the prefix; 16 KiB a row.
USUAL: dict[str, Any] = {
    "image_seconds": 0.01,
    "prefix_seconds": 0.06,
    "suffix_seconds": 0.03,
    "batch_rows": 128,
    "rows": 12800,
    "views": 1,
    "row_bytes": 1 << 14,
    "epochs_left": 9.0,
    "memory_bytes": 4 * GIB,
    "rates": RATES,
}


def situation(**changes: Any) -> CostMeasurement:
    return CostMeasurement(**(USUAL | changes))


def slow(factor: float, **changes: Any) -> Rates:
    values = {name: seconds * (factor if name in ("read_cold", "write") else 1) for name, seconds in FAST.items()}
    return Rates(**(values | {"free_bytes": 100 * GIB, "filesystem": "node:1"} | changes))


def seconds(plan: Plan) -> float:
    """Until the run ends."""
    return plan.seconds_saved + plan.seconds_saved_later


DECISIONS: dict[str, tuple[dict[str, Any], int | None, bool, str]] = {
    "usual": ({}, None, True, "saves"),
    "last epoch": ({"epochs_left": 1.0}, None, False, "no row will be read again in the remaining 1.0 epochs"),
    "no epoch left": ({"epochs_left": 0.0}, None, False, "no row will be read again"),
    "two epochs": ({"epochs_left": 2.0}, None, True, "saves"),
    "tiny budget": ({}, 10 << 20, False, "--cache-limit leaves"),
    "budget that just fits": ({}, 12800 << 14, True, "saves"),
    "full disk": ({"rates": slow(1, free_bytes=1 << 20)}, None, False, "free"),
    "cut about to move, and no time after": (
        {"epochs_until_move": 2.0, "views": 4, "epochs_left": 4.0},
        None,
        False,
        "none of 4 views will be read again in the remaining 4.0 epochs",
    ),
    "cut about to move": ({"epochs_until_move": 1.0}, None, True, "saves"),
    "cut that moves before all views were seen": ({"epochs_until_move": 1.5, "views": 4}, None, True, "saves"),
    "cut that moves within an epoch": ({"epochs_until_move": 0.9}, None, True, "saves"),
    "cut that moves within the last epoch": (
        {"epochs_until_move": 0.9, "epochs_left": 1.0},
        None,
        False,
        "no row will be read again",
    ),
    "slow disk, cut about to move": (
        {"epochs_until_move": 1.0, "rates": slow(100), "memory_bytes": 0},
        None,
        False,
        "probably change",
    ),
    "cut that stays": ({"epochs_until_move": 4.0}, None, True, "saves"),
    "slow disk, rows in memory": ({"rates": slow(100)}, None, True, "saves"),
    "slow disk, rows not in memory": ({"rates": slow(100), "memory_bytes": 0}, None, False, "longer than computing"),
    "slow disk behind a long step": (
        {"rates": slow(100), "memory_bytes": 0, "suffix_seconds": 0.5},
        None,
        True,
        "saves",
    ),
    "cheap prefix": ({"image_seconds": 0.0, "prefix_seconds": 1e-4}, None, False, "longer than computing"),
    "more views than epochs": ({"views": 9}, None, False, "none of 9 views will be read again"),
    "views that come again": ({"views": 4}, None, True, "saves"),
    "cached by an earlier run": ({"present": (1.0,), "epochs_left": 1.0}, None, True, "saves"),
    "cached, and no room for more": ({"present": (1.0,)}, 0, True, "saves"),
    "cached, and no room on the disk": ({"present": (1.0,), "rates": slow(1, free_bytes=0)}, None, True, "saves"),
    "half of it cached in other files": ({"present": (0.5,)}, 6400 << 14, True, "saves"),
    "half of it cached in a file to be completed": (
        {"present": (0.5,), "rows_rewritten": 6400},
        12799 << 14,
        False,
        "--cache-limit leaves",
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_the_plan_decides_by_the_rule(name: str) -> None:
    changes, limit_bytes, use, reason = DECISIONS[name]
    plan = make_plan([situation(**changes, left_bytes=limit_bytes)])
    assert plan.use is use and reason in plan.reason, plan
    assert seconds(plan) > 0 or not plan.use
    assert reason in plan.table()


def test_the_prediction_is_the_difference_of_the_two_runs() -> None:
    one = situation(views=2)
    plan = make_plan([one])
    filling, reading = 2 * 100, 7 * 100
    without = 900 * 0.07
    with_cache = filling * (0.07 + one.write_seconds) + reading * one.read_seconds
    assert seconds(plan) == pytest.approx(without - with_cache)


def test_rows_of_a_cut_that_moves_on_are_read_once_more_for_a_deeper_one() -> None:
    one = situation(views=2, epochs_until_move=3.0)
    spared, writing = 0.07 - one.read_seconds, one.write_seconds
    assert seconds(make_plan([one])) == pytest.approx(100 * ((1 + 2) * spared - 2 * writing))
    # Views 1 and 2 of 4 are there when the cut moves after two epochs, and come again in epochs 5 and 6 of 5.5.
    two = situation(views=4, epochs_until_move=2.0, epochs_left=5.5)
    assert seconds(make_plan([two])) == pytest.approx(100 * (1.5 * spared - 2 * writing))


def test_a_rank_without_samples_stands_in_nobodys_way() -> None:
    nothing = situation(rows=0, row_bytes=0, image_seconds=0.0, prefix_seconds=0.0)
    alone = make_plan([situation()])
    both = make_plan([situation(), nothing])
    assert both.use and seconds(both) == pytest.approx(seconds(alone))
    assert not make_plan([nothing]).use


def test_the_slowest_rank_counts() -> None:
    fast, late = situation(), situation(rates=slow(100), memory_bytes=0)
    assert make_plan([fast, fast]).use
    both = make_plan([fast, late])
    assert not both.use and seconds(both) == pytest.approx(seconds(make_plan([late])))


def test_ranks_add_up_on_a_shared_file_system_and_in_the_budget_but_not_on_disks_of_their_own() -> None:
    size = situation().num_bytes
    here = [situation(rates=slow(1, free_bytes=size * 3 // 2)) for _ in range(2)]
    apart = [situation(rates=slow(1, free_bytes=size * 3 // 2, filesystem=f"node:{k}")) for k in range(2)]
    assert not make_plan(here).fits and make_plan(apart).fits
    for each, fits in ((size, True), (size - 1, False)):
        assert make_plan([replace(rank, left_bytes=each) for rank in apart]).fits is fits


def test_each_rank_has_a_share_of_the_budget_of_its_own() -> None:
    small, large = (situation(rows=rows, left_bytes=12800 << 14) for rows in (6400, 19200))
    plan = make_plan([small, large])
    assert not plan.fits and not plan.use
    assert plan.reason == "needs 0.29 GiB on rank 1, but its share of --cache-limit leaves 0.20"
    assert make_plan([small, replace(large, left_bytes=19200 << 14)]).fits


def test_the_plan_does_not_depend_on_the_order_of_ranks() -> None:
    ranks = [situation(prefix_seconds=0.06 + k / 100, rows=12800 - k) for k in range(4)]
    assert make_plan(ranks) == make_plan(ranks[::-1])


def test_types_and_views_are_advised_and_not_chosen() -> None:
    plan = make_plan([situation(views=4, left_bytes=1 << 20)])
    advice = [value for name, value in plan.rows if name == "advice"]
    assert not plan.use and any("float16" in text for text in advice) and any("views:2" in text for text in advice)
    assert not [value for name, value in make_plan([situation()]).rows if name == "advice"]


def test_a_fixed_cut_never_moves() -> None:
    assert situation().epochs_until_move == math.inf
    assert "inf" in make_plan([situation()]).table()


def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    rates = measure_directory(tmp_path, row_bytes=1 << 14, batch_rows=32)
    assert 0 < rates.read_warm <= rates.read_cold and min(rates.write_cpu, rates.write, rates.hash, rates.read_cpu) > 0
    assert rates.free_bytes > 0 and list(tmp_path.iterdir()) == []


def test_a_process_that_lost_its_core_for_the_whole_time_still_measures(tmp_path: Path) -> None:
    rates = measure_directory(tmp_path, row_bytes=4096, batch_rows=16, most_seconds=0.0)
    assert min(rates.write, rates.read_cold, rates.read_warm) > 0


def test_a_slower_disk_is_measured_as_slower(tmp_path: Path) -> None:
    disk = Disk(read_rate=1e7, write_rate=2e7)
    rates = measure_directory(tmp_path, row_bytes=1 << 12, batch_rows=16, disk=disk)
    assert rates.read_cold >= 1e-7 and rates.write >= 0.5e-7
    assert rates.write_cpu < rates.write and rates.read_cpu < rates.read_warm


def test_a_probe_writes_no_more_than_it_is_told(tmp_path: Path) -> None:
    class Counting(Disk):
        written = 0

        def write(self, num_bytes: int) -> None:
            Counting.written += num_bytes

    for most_bytes, expected in ((10 << 14, 8 << 14), (0, 4 << 14)):
        Counting.written = 0
        measure_directory(tmp_path, row_bytes=1 << 14, batch_rows=4, most_bytes=most_bytes, disk=Counting())
        assert Counting.written == expected, "whole batches, one at least"


def test_a_directory_is_measured_again_only_for_more_rows_or_where_more_is_at_stake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[tuple[int, float]] = []

    def measured(directory: Path, *, most_bytes: int, most_seconds: float, **sizes: int) -> Rates:
        probes.append((most_bytes, most_seconds))
        return cache_decision.FREE_OF_CHARGE

    monkeypatch.setattr(cache_decision, "measure_directory", measured)
    monkeypatch.setattr(cache_decision, "free_bytes", lambda directory: 5)
    known = False
    for rows, at_stake in (
        *((100, 2.0), (30, 2.0), (100, 3.9), (100, 4.1), (200, 1.0), (150, 1.9)),
        *((10**9, 1e9), (10**10, 1e10)),
    ):
        before = len(probes)
        free = cache_decision.rates_of(tmp_path, 1000, 8, rows=rows, at_stake=at_stake).free_bytes
        known = len(probes) == before
        assert free == (5 if known else cache_decision.FREE_OF_CHARGE.free_bytes), "what is free is asked each time"
    seconds = [each for _, each in probes]
    assert known and [each for each, _ in probes] == [100_000, 100_000, 200_000, PROBE_BYTES]
    assert seconds == [*(pytest.approx(cache_decision.PROBED * each) for each in (2.0, 4.1, 1.0)), PROBE_SECONDS]
    monkeypatch.undo()
    with pytest.raises(CacheFault, match="gone cannot be measured"):
        cache_decision._MEASURED[tmp_path / "gone", 1, 1] = cache_decision.Measured(1, 1.0, RATES)
        cache_decision.rates_of(tmp_path / "gone", 1, 1, rows=1, at_stake=1.0)


def test_rows_of_many_megabytes_can_be_measured(tmp_path: Path) -> None:
    assert measure_directory(tmp_path, row_bytes=40 << 20, batch_rows=128).read_warm > 0


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheFault, match="cannot be measured"):
        measure_directory(tmp_path / "absent", row_bytes=1 << 12, batch_rows=16)


@pytest.mark.parametrize(("rows", "padded", "steps"), [(256, False, 2), (257, False, 2), (257, True, 3), (90, True, 1)])
def test_a_last_batch_that_is_padded_counts(rows: int, padded: bool, steps: int) -> None:
    assert situation(rows=rows, padded=padded).steps == steps
