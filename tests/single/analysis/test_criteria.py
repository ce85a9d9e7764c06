"""Criteria that freeze blocks: the work of a run, and when an answer is negative."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import criteria
from analysis.sweeps.experiment import write_up
from analysis.sweeps.kept import KeptRuns, write_rows
from analysis.sweeps.launching import Site
from analysis.sweeps.presets import Preset
from analysis.sweeps.results import Results, open_results
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
    write_rows(kept.directory, kept.rows([run.name for run in planned]))
    return open_results(root, "criteria")


def test_work_counts_what_frozen_blocks_need_no_more(tmp_path: Path) -> None:
    results = results_of(tmp_path, linear=0.8)
    run = results.runs["counting-none-8-s0"]
    assert criteria.work(run) == pytest.approx(len(run.metrics))
    frozen = results.runs["counting-linear-8-s0"]
    assert 0.75 < criteria.work(frozen) / len(frozen.metrics) < 1


def test_an_answer_is_negative_where_a_schedule_is_ahead_at_equal_work(tmp_path: Path) -> None:
    (answer,) = criteria.answers(results_of(tmp_path / "worse", linear=0.8))
    assert not answer.negative and "Against nothing frozen +0.0 points" in answer.text
    assert criteria.answers(results_of(tmp_path / "better", linear=0.95))[0].negative


def test_the_page_says_what_was_frozen_too_early(tmp_path: Path) -> None:
    results = results_of(tmp_path, linear=0.8)
    write_up(criteria.EXPERIMENT, Preset(seeds=SEEDS), results, made=True)
    page = (tmp_path / "results" / "criteria" / "README.md").read_text()
    assert "too early: loses 9.9" in page
