"""The experiment on strategies: its plans, and what it makes of runs whose numbers are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis import strategies
from analysis.parts.strategies import grid_runs, redealing_runs, ring_runs, subnet_runs
from analysis.sweeps import experiment as pages
from analysis.sweeps import sweep
from analysis.sweeps.launching import Site
from analysis.sweeps.presets import REDUCED, SMOKE, PlannedRun
from hvfreeze.model.mlp import Mlp
from hvfreeze.runs.reading import Run
from hvfreeze.strategies.subnets.dealing import Table
from tests.single.analysis.runs_material import carried_out, made_up


def test_the_bound_is_the_papers() -> None:
    """GPipe's and HyPar-Flow's: P M / (M + P - 1)."""
    found = [round(grid_runs.bound(2, 1, number), 2) for number in (1, 4, 8)]
    assert found == [1.0, 1.6, 1.78] and grid_runs.bound(1, 3, 1) == 3.0


def test_every_run_is_one_that_the_program_accepts_and_nodes_come_last() -> None:
    for preset in (SMOKE, REDUCED):
        planned = sweep.plan(strategies.EXPERIMENT, preset, sweep.Results(Path()))
        strategies_tried = {run.config().strategy.strategy for run in planned}
        assert strategies_tried - {"replicas"} == {
            "grid",
            "shared-trunk",
            "local-critics",
            "stale-ring",
            "local-sgd",
            "subnets",
        }
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
    if planned.flags["strategy"] == "replicas":
        return {"cpu_seconds": 2.0}
    if planned.flags["strategy"] == "stale-ring":
        return {"test_loss": 0.612}
    if planned.flags["strategy"] == "local-sgd":
        return {"cpu_seconds": 2.0, "local_sgd": {"wire_bytes": {"parts": 10**6, "means": 10**6}}}
    if planned.flags["strategy"] == "subnets":
        matrices = {"hidden1.linear.weight": 1.0, "hidden2.linear.weight": 0.5, "head.linear.weight": 1.0}
        # 20 rounds of a step: each of two ranks sends the other half of what that one trains.
        sent = {"dealt": 20 * 1062912, "returned": 20 * 1062912}
        return {"cpu_seconds": 1.0, "subnets": {"wire_bytes": sent, "touched": matrices}}
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
    trunk, exits, ring, step, ways, rounds, *_, memory, dealt = strategies.tables(results)
    assert exits.rows == (("critics-3", "70.0 %", "50.0 %, 60.0 %, 70.0 %", "80.0 %", "70.0 %", *exits.rows[0][5:]),)
    assert exits.rows[0][5:] == ("50.0 %, 20.0 %, 5.0 %, 25.0 %", "40.0 %")
    fits = {row[0]: row[-1] for row in trunk.rows}
    assert fits == {"whole": "-", "split": "yes", "cached": "-"}
    assert {row[0]: row[-1] for row in memory.rows} == {"grid-1x1-m2": "NO", "grid-2x1-m2": "NO"}
    assert [row[1] for row in memory.rows] == ["2.0 MB", "1.0 MB 1.0 MB"]
    assert [row[1] for row in dealt.rows] == ["1 x 2", "1 x 2 then 2 x 1"] * 2 and dealt.rows[3][3] == "2.00x"
    missing = ["not measured"] * 6
    assert [row[1:] for row in ring.rows] == [
        ("0.600", "-", *["not measured", "-"] * 3),
        ("0.612", "+2.0 %", *missing),
    ]
    # 0.1 s of data, 1 s forward, 2.3 s backward with the update, in 10 steps.
    assert [row[2] for row in step.rows] == ["-", "340 ms", "187 ms"]
    told_of = {row[0]: row[4] for row in ways.rows}
    # Replicas send 2 MB a step and are best after 20.
    assert told_of == {
        name: f"{share}, 1 of 1"
        for name, share in (
            ("replicas, 2 ranks", "100.0 %"),
            ("local-sgd-10, 2 ranks", "5.0 %"),
            ("subnets-1, 2 ranks", "106.3 %"),
        )
    }
    assert rounds.rows == (("subnets-1, 2 ranks", "100.0 %", "50.0 %", "100.0 %", "42.5 MB", "yes"),)
    cost, silent, early, old, faster, local, again = strategies.answers(results)
    assert "1 of 1 runs reach the replicas' best accuracy, with 5.0 % of the bytes" in local.text and not local.negative
    assert "K = 2: +2.0 %" in old.text and old.details == ("K = 2: +2.0 %",) and not old.negative and faster.negative
    assert early.text.startswith("By LC(3) samples take 40.0 % (n = 1) of the FLOPs")
    assert early.details[0] == "75.0 % of the samples leave before the last of four exits."
    assert "cached: " in again.details[-1] and "2.00x predicted" in again.details[-1]
    assert cost.details[1:] == (
        "0.25x of their processor seconds.",
        "Peak memory by rank: 0.90x, 0.80x, 0.70x of theirs.",
    )
    assert silent.text.startswith(f"{8 * 24 * 64 * 32 + 8 * 16 * 4096} bytes in the first epoch, then 0")


def test_the_bytes_of_subnets_are_the_formulas_and_the_tables() -> None:
    mlp = Mlp(subnet_runs.INPUTS, (subnet_runs.WIDTH, subnet_runs.WIDTH), subnet_runs.CLASSES)
    for ranks in (1, 2, 4):
        run = a_run({"world_size": ranks}, local_steps=10, step=25)
        each = Table.of(mlp, size=ranks).wire_bytes()
        assert subnet_runs.predicted_bytes(run) == {"dealt": 3 * each, "returned": 2 * each}


def a_run(summary: dict[str, Any], *, local_steps: int, step: int) -> Run:
    config = {"strategy": {"local_steps": local_steps}}
    metrics = ({"step": step, "epoch": 0, "test_accuracy": 0.5, "allreduce_bytes": 10},)
    return Run(name="", directory=Path(), config=config, environment={}, metrics=metrics, decisions=(), summary=summary)


def test_a_ring_ages_and_a_run_that_never_gets_there_has_no_bytes() -> None:
    run = a_run({"world_size": 4}, local_steps=10, step=25)
    assert subnet_runs.sent_bytes(run, run.metrics[0]) == 2 * 3 * 10
    assert subnet_runs.bytes_until(run, 0.5) == 60 and subnet_runs.bytes_until(run, 0.51) is None
    assert [planned.ranks for planned in ring_runs.planned(SMOKE)[:2]] == [1, 1]
