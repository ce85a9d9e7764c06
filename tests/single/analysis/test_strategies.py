"""The experiment on strategies: its plans, and what it makes of runs whose numbers are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis import strategies
from analysis.parts.strategies import grid_runs, redealing_runs
from analysis.sweeps import experiment as pages
from analysis.sweeps import sweep
from analysis.sweeps.launching import Site
from analysis.sweeps.presets import REDUCED, SMOKE, PlannedRun
from tests.single.analysis.runs_material import carried_out, made_up


def test_the_bound_is_the_papers() -> None:
    """GPipe's and HyPar-Flow's: P M / (M + P - 1)."""
    found = [round(grid_runs.bound(2, 1, number), 2) for number in (1, 4, 8)]
    assert found == [1.0, 1.6, 1.78] and grid_runs.bound(1, 3, 1) == 3.0


def test_every_run_is_one_that_the_program_accepts_and_nodes_come_last() -> None:
    for preset in (SMOKE, REDUCED):
        planned = sweep.plan(strategies.EXPERIMENT, preset, sweep.Results(Path()))
        strategies_tried = {run.config().strategy.strategy for run in planned}
        assert strategies_tried - {"replicas"} == {"grid", "shared-trunk", "local-critics"}
        assert all("weights" not in run.flags for run in planned if run.flags["strategy"] != "shared-trunk")
        nodes = [run.nodes for run in planned]
        assert nodes == sorted(nodes) and max(nodes) == (0 if preset.is_smoke else 2)


def test_a_line_takes_what_its_slowest_rank_takes_and_ranks_that_wait_take_nothing() -> None:
    halves, whole = [(0, 1), (1, 2)], [(0, 2)]
    frozen = {"cut": 1, "cached": False}
    assert redealing_runs.step_work([1.0, 1.0], halves, **frozen, micro_batches=8) == 3 * (8 + 1)
    assert redealing_runs.step_work([1.0, 1.0], whole, **frozen, micro_batches=4) == 4 * 4
    cached = {"cut": 1, "cached": True}
    assert redealing_runs.step_work([1.0, 1.0], halves, **cached, micro_batches=8) == 3 * 8
    assert redealing_runs.step_work([1.0, 1.0], whole, **cached, micro_batches=4) == 3 * 4


def told(planned: PlannedRun) -> dict[str, Any]:
    """What such a run's summary might tell of its strategy; the split trunk sent what the formula says."""
    ranks, common = planned.ranks, {"cpu_seconds": [1.0] * planned.ranks, "wait_seconds": [0.1] * planned.ranks}
    common["peak_memory_bytes"] = [10**8] * ranks
    common["forward_seconds"] = [0.3] * ranks
    if "heads" in planned.flags:
        whole = planned.flags.get("trunk") == "whole"
        common["cpu_seconds"] = [2.0 if whole else 0.5] * ranks
        common["peak_memory_bytes"] = [10**8] * ranks if whole else [9 * 10**7, 8 * 10**7, 7 * 10**7]
        # ShuffleNet at 32 pixels: 8 rows of 24 x 8 x 8 behind the stem, 1024 x 1 x 1 features for two other ranks.
        sent = {"activations": 8 * 24 * 64 * 4 * 8, "features": 8 * 2 * 8 * 1024 * 4, "labels": 0}
        return {
            "trunk": {
                **common,
                "mode": "whole" if whole else "split",
                "segments": [[0, 1], [1, 5]],
                "labels": "replay",
                "wire_bytes": dict.fromkeys(sent, 0) if whole else sent,
                "trunk_bytes": [10**6] * ranks,
                "forwards": [8] * ranks,
            }
        }
    if planned.flags["strategy"] == "local-critics":
        exits = {"exit_accuracy": [0.5, 0.6, 0.7, 0.75], "samples_by_exit": [0.5, 0.2, 0.05, 0.25]}
        return {"critics": {**exits, "ensemble_accuracy": 0.8, "early_accuracy": 0.7, "early_flops": 0.4}}
    return {
        "grid": {
            **common,
            "parts": planned.flags["parts"],
            "replicas": 1,
            "micro_batches": 2,
            "segments": [[0, 5], [5, 11]] if ranks == 2 else [[0, 11]],
            "deals": [
                {"replicas": 1, "parts": ranks, "segments": [[0, 5], [5, 11]] if ranks == 2 else [[0, 11]]},
                *([{"replicas": 2, "parts": 1, "segments": [[0, 11]]}] if planned.flags.get("redeal") == "on" else []),
            ],
            "moved_bytes": 10**6 if planned.flags.get("redeal") == "on" else 0,
            "wire_bytes": {"activations": 1, "errors": 0},
            "allreduce_bytes": [0] * ranks,
            "parameter_bytes": [10**6 // ranks] * ranks,
            "optimizer_bytes": [10**6 // ranks] * ranks,
        }
    }


def launched(planned: PlannedRun, site: Site, *, timeout: float = 0.0) -> Path:
    run_dir = made_up(planned, site)
    path = run_dir / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **told(planned)}))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({**line, **told(planned)}) + "\n" for line in lines))
    return run_dir


def test_what_was_measured_stands_beside_what_was_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "launch", launched)
    monkeypatch.setattr(pages, "save_figure", lambda figure, path: None)
    results = carried_out(strategies.EXPERIMENT, SMOKE, tmp_path)
    trunk, exits, *_, memory, dealt = strategies.tables(results)
    assert exits.rows == (("critics-3", "70.0 %", "50.0 %, 60.0 %, 70.0 %", "80.0 %", "70.0 %", *exits.rows[0][5:]),)
    assert exits.rows[0][5:] == ("50.0 %, 20.0 %, 5.0 %, 25.0 %", "40.0 %")
    fits = {row[0]: row[-1] for row in trunk.rows}
    assert fits == {"whole": "-", "split": "yes", "cached": "-"}
    assert {row[0]: row[-1] for row in memory.rows} == {"grid-1x1-m2": "NO", "grid-2x1-m2": "NO"}
    assert [row[1] for row in memory.rows] == ["2.0 MB", "1.0 MB 1.0 MB"]
    assert [row[1] for row in dealt.rows] == ["1 x 2", "1 x 2 then 2 x 1"] * 2 and dealt.rows[3][3] == "2.00x"
    cost, silent, early, again = strategies.answers(results)
    assert early.text.startswith("75.0 % of the samples leave before the last of four exits, at 40.0 % of the FLOPs")
    assert "cached: " in again.text and "2.00x predicted" in again.text
    assert "0.25x of their processor seconds; peak memory by rank 0.90x, 0.80x, 0.70x of theirs" in cost.text
    assert silent.text.startswith(f"{8 * 24 * 64 * 32 + 8 * 16 * 4096}, 0")
