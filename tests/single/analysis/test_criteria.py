"""Criteria that freeze blocks: the work of a run, and when an answer is negative."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import criteria
from analysis.sweeps.kept import KeptRuns
from analysis.sweeps.launching import Site
from analysis.sweeps.presets import Preset
from analysis.sweeps.results import Results
from tests.single.analysis.runs_material import made_up

SEEDS = (0, 1)


def results_of(folder: Path, *, linear: float) -> Results:
    """Made-up runs of counting; linear freezes two blocks half way, and is as accurate as said here."""
    preset, root = Preset(seeds=SEEDS), folder / "results"
    kept = KeptRuns(root / "criteria")
    planned = [run for run in criteria.runs(preset) if run.label.startswith("counting")]
    for run in planned:
        run_dir = made_up(run, Site(work=folder / "work"))
        path = run_dir / "summary.json"
        summary = json.loads(path.read_text())
        summary["cut_history"] = [[0, 0, 0]]
        summary["test_accuracy"] = 0.9
        if "-linear-" in run.label:
            middle = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"] // 2
            summary["cut_history"].append([4, middle, 2])
            summary["test_accuracy"] = linear + 0.001 * run.seed
        path.write_text(json.dumps(summary))
        kept.keep(run_dir, run, source="abc")
    return criteria.EXPERIMENT.open(root)


def test_work_counts_what_frozen_blocks_need_no_more(tmp_path: Path) -> None:
    results = results_of(tmp_path, linear=0.8)
    run = results.runs["counting-none-8-s0"]
    assert criteria.work(run) == pytest.approx(len(run.metrics))
    frozen = results.runs["counting-linear-8-s0"]
    assert 0.75 < criteria.work(frozen) / len(frozen.metrics) < 1
    lost = criteria.row_of(results, "counting", "linear", 8)
    assert lost[-1].startswith("too early: loses 9.9")
