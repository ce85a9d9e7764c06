"""The experiment on strategies: its plans, and what it makes of runs whose numbers are made up."""

from __future__ import annotations

from pathlib import Path

from analysis import strategies
from analysis.parts.strategies import grid_runs, redealing_runs
from analysis.sweeps import sweep
from analysis.sweeps.presets import REDUCED, SMOKE


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
