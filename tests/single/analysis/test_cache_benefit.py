"""Whole commands with and without the cache: their order, what pairs and sweeps come to, and what a page says."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from analysis import cache_benefit
from analysis.cache_benefit import ALONE, AUTO, OFF, ON, SHARED, STATIC, SWEPT, VOTED, Sweep
from analysis.sweeps import launching, sweep
from analysis.sweeps.launching import Site, flags_of
from analysis.sweeps.presets import REDUCED, SMOKE, PlannedRun
from analysis.sweeps.results import Results
from hvfreeze.errors import RefusedError
from tests.single.analysis.runs_material import made_up

EARLIER = 8.0
"""Seconds that a cache saves of every command of 20, of which 15 are training."""


def row(run: PlannedRun) -> dict[str, Any]:
    """A row as such a run might have: the first of a sweep saves less, and seeds differ in speed alike both ways."""
    cached = run.flags.get("cache", "off") != "off"
    first = run.label.endswith(f"-lr{cache_benefit.LEARNING_RATES[0]:g}-{SHARED}")
    saved, slower = (EARLIER / 2 if first else EARLIER) * cached, 1 + 0.1 * run.seed
    return {
        "run": run.name,
        "label": run.label,
        "seed": run.seed,
        "cache": run.flags.get("cache", "off"),
        "whole_seconds": slower * (20.0 - saved),
        "train_seconds": slower * (15.0 - saved),
        "test_accuracy": 0.5,
        "parameter_digest": f"{run.label.rpartition('-')[0]}{run.seed}",
        "cache_bytes": 1_000_000 * cached,
        "cache_rows_written": 100 * (cached and (first or not run.label.endswith(SHARED))),
        "cache_rows_read": 500 * cached,
        "cache_seconds_saved": saved,
        "cache_seconds_saved_predicted": slower * saved + 2.0 * cached,
    }


def results(folder: Path, changes: dict[str, Any] | None = None, *, of: str = "px") -> Results:
    """All rows of the reduced preset; those whose label begins with `of` are changed."""
    rows = [row(run) for run in cache_benefit.runs(REDUCED)]
    return Results(folder, [{**each, **(changes or {})} if each["label"].startswith(of) else each for each in rows])


def test_pairs_of_a_seed_stand_side_by_side_and_their_order_is_turned_round_from_one_to_the_next() -> None:
    planned = cache_benefit.runs(REDUCED)
    assert len({run.name for run in planned}) == len(planned)
    for setting in STATIC:
        mine = [run for run in planned if run.label in (setting.label(ON), setting.label(OFF))]
        ways = "".join("A" if run.label == setting.label(ON) else "B" for run in mine)
        assert ways == "ABBA" * (2 if setting.size == 128 else 3)
        places = [planned.index(run) for run in mine]
        assert all(b == a + 1 for a, b in itertools.pairwise(places[:4]))
        assert [run.seed for run in mine] == [seed for seed in range(len(mine) // 2) for _ in range(2)]
    ways = [run.label.rpartition("-")[2] for run in planned if "voted" in run.label]
    assert ways == [OFF, ON, AUTO, AUTO, ON, OFF] * 2


def test_runs_of_a_pair_differ_in_the_cache_alone_and_views_come_again_three_times() -> None:
    for setting, way in (*((each, ON) for each in STATIC), (VOTED, ON), (VOTED, AUTO), *((s, SHARED) for s in SWEPT)):
        ours, theirs = setting.flags(REDUCED, way), setting.flags(REDUCED, ALONE if way == SHARED else OFF)
        assert {name: value for name, value in ours.items() if name not in ("cache", "cache_dir")} == theirs
        assert int(str(ours["epochs"])) >= 3 * int(str(ours["augment"]).partition(":")[2])
    swept = [run for run in cache_benefit.runs(REDUCED) if SHARED in run.label]
    assert {
        len([run for run in swept if run.flags["cache_dir"] == name]) for name in {r.flags["cache_dir"] for r in swept}
    } == {10}


def test_gains_errors_and_totals_are_taken_within_pairs(tmp_path: Path) -> None:
    found = results(tmp_path)
    assert cache_benefit.gain(found, STATIC[0]).mean == pytest.approx(20 / 12)
    assert cache_benefit.gain(found, STATIC[0], column="train_seconds").mean == pytest.approx(15 / 7)
    assert cache_benefit.gain(found, STATIC[0]).n == 6
    error = cache_benefit.plan_error(found, STATIC[0])
    assert (error.mean, error.n) == (pytest.approx(2.0), 6)
    swept = Sweep(found, SWEPT[0])
    assert (sum(swept.alone), sum(swept.shared)) == (pytest.approx(200), pytest.approx(16 + 9 * 12))
    assert (swept.gain, swept.later_gain.mean, swept.later_gain.n) == (200 / 124, pytest.approx(20 / 12), 9)
    assert swept.equal
    other = results(tmp_path, {"parameter_digest": "other"}, of=SWEPT[0].label(SHARED, 0.02))
    assert not Sweep(other, SWEPT[0]).equal


@pytest.mark.usefixtures("no_files")
def test_a_shared_cache_is_empty_for_the_first_kept_run_and_stays_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, seen, fails = Site(work=tmp_path / "work"), [], [True]

    def launch(planned: PlannedRun, site: Site, *, timeout: float) -> Path:
        folder = Path(flags_of(planned, site, tmp_path)[flags_of(planned, site, tmp_path).index("--cache-dir") + 1])
        seen.append(len(list(folder.iterdir())) if folder.exists() else 0)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / planned.name).touch()
        if fails[0]:
            raise RefusedError("cut off")
        return made_up(planned, site)

    monkeypatch.setattr(sweep, "launch", launch)
    planned = [run for run in cache_benefit.runs(REDUCED) if SWEPT[0].label(SHARED, 0.001)[:10] in run.label]
    planned = [run for run in planned if run.label.endswith(SHARED)][:3]
    assert sweep.make(planned[:1], REDUCED, site, tmp_path / "results" / "x") == [planned[0].name]
    fails[0] = False
    assert sweep.make(planned, REDUCED, site, tmp_path / "results" / "x") == []
    assert seen == [0, 0, 1, 2]
    shutil.rmtree(site.work / str(planned[0].flags["cache_dir"]))
    wanted = rf"--work \({site.work}\) must have shared-px128-cut5, the shared cache of {planned[0].name}, .*runs.jsonl"
    (later,) = [run for run in cache_benefit.runs(REDUCED) if run.label == SWEPT[0].label(SHARED, 0.2)]
    with pytest.raises(RefusedError, match=wanted):
        sweep.make([later], REDUCED, site, tmp_path / "results" / "x")
    assert len(seen) == 4


def test_a_run_without_checkpoints_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "follow", lambda command, log, look, *, timeout: 0)
    for every in ("0", "5"):
        planned = SMOKE.run(f"every{every}", 0, {"checkpoint_every": every})
        left = tmp_path / planned.name / "cache" / "rows.h5"
        left.parent.mkdir(parents=True)
        left.touch()
        (tmp_path / planned.name / "summary.json").touch()
        if every == "0":
            with pytest.raises(RefusedError), (tmp_path / f"{planned.name}.log").open("w"):
                launching.launch(planned, Site(work=tmp_path), timeout=1.0)
        else:
            launching.launch(planned, Site(work=tmp_path), timeout=1.0)
        assert left.exists() == (every == "5")
