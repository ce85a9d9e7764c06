"""What the parts of --freeze auto give is held against the run that peers make too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis import auto_parts, peers
from analysis.sweeps import experiment as sweep
from analysis.sweeps import writeup
from analysis.sweeps.presets import REDUCED, SMOKE
from analysis.sweeps.results import Results
from tests.single.analysis.runs_material import carried_out, made_up


def test_the_whole_and_what_is_solved_alone_are_the_runs_that_peers_make_too() -> None:
    theirs = {run.name: run for run in peers.then(REDUCED, Results(Path(), []), peers.Ground())}
    shared = [run for run in auto_parts.runs(REDUCED) if run.name in theirs]
    assert {run.label for run in shared} == {auto_parts.WHOLE, auto_parts.SOLVED}
    assert [run.identity() for run in shared] == [theirs[run.name].identity() for run in shared]


def test_every_part_is_left_out_once_and_differs_in_that_alone() -> None:
    by_label = {run.label: run.flags for run in auto_parts.runs(REDUCED)}
    assert by_label.keys() == {auto_parts.WHOLE, *auto_parts.PARTS} == {auto_parts.WHOLE, *auto_parts.WORDS}
    for label, changes in auto_parts.PARTS.items():
        assert {key: by_label[label][key] for key in changes} == changes
        rest = by_label[label].keys() - changes.keys()
        assert all(by_label[label][key] == by_label[auto_parts.WHOLE][key] for key in rest)


def test_a_part_that_gives_points_helps_and_one_that_takes_them_is_negative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "launch", made_up)
    monkeypatch.setattr(writeup, "save_figure", lambda figure, path: None)
    results = carried_out(auto_parts.EXPERIMENT, replace(SMOKE, seeds=(0, 1, 2)), tmp_path)
    assert set(results.labels) == {auto_parts.WHOLE, "without-votes"}

    def shown_when(points: float) -> str:
        rows = [
            {**row, "test_accuracy": 0.5 + 0.001 * row["seed"] + (points if row["label"] == auto_parts.WHOLE else 0.0)}
            for row in results.rows
        ]
        (table,) = auto_parts.tables(replace(results, rows=rows))
        return str(table.rows[1][3])

    assert shown_when(0.02) == "it helps"
    assert shown_when(-0.02) == "it harms (negative)"
    assert "without it: votes while tuning" in auto_parts.answers(results)[0].text
