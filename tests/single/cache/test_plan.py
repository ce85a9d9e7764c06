"""Whether rows are worth storing: the decision, the forecast behind it, and the measurement of the disk."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.planning import (
    FULL_DISK,
    PROBE_BYTES,
    CostMeasurement,
    Rates,
    forecast,
    make_plan,
    measure_directory,
    seconds_saved,
)
from tests.single.cache.material import BATCH_ROWS, FrozenNet, batches_of

# 100 steps an epoch of 70 ms each; 16 KiB a row.
USUAL: dict[str, Any] = {
    "image_seconds": 0.01,
    "prefix_seconds": 0.06,
    "batch_rows": 128,
    "rows": 12800,
    "views": 1,
    "row_bytes": 1 << 14,
    "epochs_left": 9.0,
    "rates": Rates(read=1e-10, write=2e-9, write_cpu=1e-9),
    "free_bytes": 100 << 30,
    "filesystem": "node:1",
}
SLOW = Rates(read=1e-7, write=2e-7)


def situation(**changes: Any) -> CostMeasurement:
    return CostMeasurement(**(USUAL | changes))


DECISIONS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "usual": ({}, True, "saves"),
    "last epoch": ({"epochs_left": 1.0}, False, "no row will be read again in the remaining 1.0 epochs"),
    "tiny budget": ({"left_bytes": 10 << 20}, False, "--cache-limit leaves"),
    "full disk": ({"free_bytes": 1 << 20}, False, "free"),
    "cut that moves before all views were seen": ({"epochs_until_move": 1.5, "views": 4}, True, "saves"),
    "slow disk, cut about to move": ({"epochs_until_move": 1.0, "rates": SLOW}, False, "probably change"),
    "slow disk": ({"rates": SLOW}, False, "longer than computing"),
    "disk that writes while batches are computed": (
        {"rates": Rates(read=1e-9, write=4e-8), "epochs_left": 2.0},
        True,
        "saves",
    ),
    "cheap prefix": ({"image_seconds": 0.0, "prefix_seconds": 1e-4}, False, "longer than computing"),
    "more views than epochs": ({"views": 9}, False, "none of 9 views will be read again"),
    "cached by an earlier run": ({"present": (1.0,), "epochs_left": 1.0}, True, "saves"),
    "cached, and no room for more": ({"present": (1.0,), "left_bytes": 0}, True, "saves"),
    "half of it cached in a file to be completed": (
        {"present": (0.5,), "rows_rewritten": 6400, "left_bytes": 12799 << 14},
        False,
        "--cache-limit leaves",
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_the_plan_decides_by_the_rule(name: str) -> None:
    changes, use, reason = DECISIONS[name]
    rank = situation(**changes)
    plan = make_plan([rank])
    assert plan.use is use and reason in plan.reason, plan
    assert not use or seconds_saved([rank], kept=True) > seconds_saved([rank], kept=False)
    assert reason in plan.table()


SAVED: dict[str, tuple[dict[str, Any], bool, float]] = {
    # Per step: 7 epochs of 9 are read, 2 are written.
    "two views": ({"views": 2}, True, 7 * (0.07 - 0.02) - 2 * 0.01),
    # Views 1 and 2 of 4 are there when the cut moves after two epochs, and come again in epochs 5 and 6 of 5.5.
    "a cut that moves, and an end": (
        {"views": 4, "epochs_until_move": 2.0, "epochs_left": 5.5},
        True,
        1.5 * (0.07 - 0.02) - 2 * 0.01,
    ),
    "rows of a shallower cut": (
        {"source_share": 0.5, "source_spares": 0.04},
        True,
        8 * (0.07 - 0.02) + 0.5 * 0.04 - 0.01,
    ),
    "rows computed beforehand": (
        {"views": 2, "all_at_once": True, "present": (0.5, 0.0)},
        True,
        9 * (0.07 - 0.02) - 1.5 * (0.07 + 0.01),
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_reading_saves_the_time_of_computing_and_storing_costs_time(name: str) -> None:
    changes, kept, expected = SAVED[name]
    batch_bytes = 128 << 14
    rank = situation(rates=Rates(read=0.02 / batch_bytes, write_cpu=0.01 / batch_bytes), **changes)
    assert seconds_saved([rank], kept=kept) == pytest.approx(100 * expected)


@pytest.mark.parametrize(("views", "move", "end"), [(2, 9, 5), (1, 2, 4), (3, 2, 5)])
def test_as_many_rows_are_read_as_is_forecast(views: int, move: int, end: int, tmp_path: Path) -> None:
    """At cut 1 while it stays, and from cut 1 after it has moved to 3."""
    net, ids = FrozenNet(), np.arange(4 * BATCH_ROWS)
    owned_keys = (np.tile(ids, views), np.repeat(np.arange(views), len(ids)))
    cached, read = net.cached(tmp_path), 0
    for epoch in range(end):
        if epoch in (0, move):
            cut, read = 1 if epoch == 0 else 3, cached.counters.rows_read
            cached.begin_cut(cut, fingerprint=net.fingerprint(cut), owned_keys=owned_keys)
        for batch in batches_of(len(ids), epoch=epoch, views=views):
            cached.get(*batch)
    found = forecast(situation(views=views, epochs_left=end, epochs_until_move=move))
    assert found.read * len(ids) == (read if move < end else cached.counters.rows_read)
    assert found.read_later * len(ids) == cached.counters.rows_advanced.get(1, 0)
    cached.close()


def test_the_slowest_rank_counts_whatever_the_order_and_a_rank_without_samples_does_not() -> None:
    fast, late = situation(), situation(rates=SLOW)
    nothing = situation(rows=0, row_bytes=0, image_seconds=0.0, prefix_seconds=0.0)
    assert make_plan([fast, fast]).use and not make_plan([fast, late]).use and not make_plan([nothing]).use
    assert make_plan([fast, late]).seconds_saved == pytest.approx(make_plan([late]).seconds_saved)
    assert make_plan([fast, nothing]).seconds_saved == pytest.approx(make_plan([fast]).seconds_saved)
    ranks = [situation(prefix_seconds=0.06 + k / 100, rows=12800 - k) for k in range(4)]
    assert make_plan(ranks) == make_plan(ranks[::-1])


def test_ranks_add_up_on_a_shared_file_system_and_in_the_budget_but_not_on_disks_of_their_own() -> None:
    size = situation().new_bytes
    here = [situation(free_bytes=size * 3 // 2) for _ in range(2)]
    apart = [replace(rank, filesystem=f"node:{k}") for k, rank in enumerate(here)]
    assert not make_plan(here).fits and make_plan(apart).fits
    for each, fits in ((size, True), (size - 1, False)):
        assert make_plan([replace(rank, left_bytes=each) for rank in apart]).fits is fits
    small, large = (situation(rows=rows, left_bytes=12800 << 14) for rows in (6400, 19200))
    plan = make_plan([small, large])
    assert not plan.fits and not plan.use
    assert plan.reason == "needs 0.29 GiB on rank 1, but its share of --cache-limit leaves 0.20"
    assert make_plan([small, replace(large, left_bytes=19200 << 14)]).fits


@pytest.mark.parametrize("changes", [{"left_bytes": 1 << 20}, {"in_memory": False, "epochs_left": 8.0}])
def test_types_and_views_are_advised_and_not_chosen(changes: dict[str, Any]) -> None:
    advice = [value for name, value in make_plan([situation(views=4, **changes)]).rows if name == "advice"]
    assert any("float16" in text for text in advice) and any("views:2" in text for text in advice)
    assert not [value for name, value in make_plan([situation()]).rows if name == "advice"]


@pytest.mark.parametrize(("rows", "padded", "steps"), [(256, False, 2), (257, False, 2), (257, True, 3), (90, True, 1)])
def test_a_last_batch_that_is_padded_counts(rows: int, padded: bool, steps: int) -> None:
    assert situation(rows=rows, padded=padded).steps == steps


@pytest.mark.parametrize(
    ("row_bytes", "most_bytes", "written"),
    [
        (1 << 14, 10 << 14, 10 << 14),
        (1 << 14, 0, 1 << 14),
        (5000, 1 << 30, PROBE_BYTES // 5000 * 5000),
        (40 << 20, 1 << 30, PROBE_BYTES),
    ],
    ids=["all rows", "one row at least", "many rows", "a large row"],
)
def test_a_directory_is_measured_with_few_bytes_and_left_as_it_was(
    row_bytes: int, most_bytes: int, written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size) or fsync(descriptor))
    for warm in (True, False):
        rates = measure_directory(tmp_path, row_bytes=row_bytes, batch_rows=4, most_bytes=most_bytes, warm=warm)
        assert min(rates.read, rates.write) > 0 and list(tmp_path.iterdir()) == []
    assert sizes == [written, written]


def test_a_full_disk_is_assumed_slow_and_one_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"row_bytes": 1 << 12, "batch_rows": 16, "most_bytes": 1 << 16}
    with pytest.raises(CacheFault, match="absent cannot be measured"):
        measure_directory(tmp_path / "absent", **sizes, warm=True)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert measure_directory(tmp_path, **sizes, warm=True) == FULL_DISK
    assert list(tmp_path.iterdir()) == []
