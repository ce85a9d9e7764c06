"""The experiment on strategies: its plans, and what it makes of runs whose numbers are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis import strategies
from analysis.parts.strategies import grid_runs, redealing_runs, ring_runs, subnet_runs
from analysis.sweeps import sweep
from analysis.sweeps.kept import RESULTS
from analysis.sweeps.presets import REDUCED, SMOKE
from hvfreeze.model.mlp import Mlp
from hvfreeze.runs.reading import Run
from hvfreeze.strategies.subnets.dealing import Table


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


def test_what_ranks_sent_is_what_the_formulas_say() -> None:
    page = (RESULTS / "strategies" / "README.md").read_text()
    assert page.count("As predicted") >= 2 and " yes |" in page and " NO |" not in page


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
