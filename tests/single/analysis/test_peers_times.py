"""Training time as the sum over a run's steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis import step_costs
from analysis.parts.peers.times import file_of, seconds_of, timed
from analysis.sweeps.results import Results

KINDS = {
    "ddp": 7.0,
    **{f"live{cut}": 10.0 - cut for cut in range(6)},
    **{f"cached{cut}": 1 / cut for cut in range(1, 6)},
}
COSTS = {"2 ranks, batches of 64": KINDS}
PLAIN: dict[str, Any] = {
    "label": "n5000-full-e4",
    "program": "hvfreeze",
    "ranks": 2,
    "batch_size": 64,
    "image_size": 32,
    "steps": 40,
    "epochs": 4,
    "final_cut": 0,
    "cut_history": "0@0",
    "cache": "off",
    "augment": "fresh",
    "train_seconds": 3.0,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 40 * 10.0),
        ({"program": "analysis.ddp"}, 40 * 7.0),
        ({"cut_history": "0@0 2@10 5@30"}, 10 * 10.0 + 20 * 8.0 + 10 * 5.0),
        ({"cut_history": "4@0", "final_cut": 4}, 40 * 6.0),
        ({"cut_history": "4@0", "final_cut": 4, "cache": "on", "augment": "views:2"}, 20 * 6.0 + 20 * 0.25),
        (
            # Each view comes again after two epochs: what was stored then is where its forward pass begins.
            {"cut_history": "0@0 2@10 4@30", "final_cut": 4, "cache": "on", "augment": "views:2"},
            10 * 10.0 + 20 * 8.0 + 10 * (6.0 - (8.0 - 0.5)),
        ),
        ({"program": "analysis.lp_ft", "steps": 140, "epochs": 4}, 20 * 5.0 + 80 * 0.2 + 40 * 10.0),
    ],
)
def test_a_run_takes_what_its_steps_cost(changes: dict[str, Any], expected: float) -> None:
    assert seconds_of({**PLAIN, **changes}, COSTS) == pytest.approx(expected)


def test_what_is_solved_and_what_was_not_timed_keeps_its_clock(tmp_path: Path) -> None:
    path = file_of(tmp_path, 32)
    path.parent.mkdir()
    seconds = {"2 ranks, batches of 64": {kind: [0.0, value, 1e9] for kind, value in KINDS.items()}}
    path.write_text(json.dumps({"seconds": seconds}))
    rows = [PLAIN, {**PLAIN, "label": "n5000-exact-e1"}, {**PLAIN, "ranks": 3}, {**PLAIN, "image_size": 64}]
    rows.append({**PLAIN, "model": "mobilenet_v3_small"})
    found = timed(Results(tmp_path / "peers", rows))
    assert [row["train_seconds"] for row in found.rows] == [400.0, 3.0, 3.0, 3.0, 3.0]


def test_steps_are_added_to_those_of_the_same_source_and_machine_only(tmp_path: Path) -> None:
    path, now = tmp_path / "64px.json", {"commit": "abc", "cores": 4}
    assert step_costs.begun(path, now) == {**now, "seconds": {}}
    path.write_text(json.dumps({**now, "seconds": {"2 ranks": {"live0": [1.0]}}}))
    assert step_costs.begun(path, now)["seconds"] == {"2 ranks": {"live0": [1.0]}}
    assert step_costs.begun(path, {**now, "cores": 2}) == {"commit": "abc", "cores": 2, "seconds": {}}
