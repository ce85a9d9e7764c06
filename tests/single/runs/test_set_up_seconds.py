from __future__ import annotations

import json
from pathlib import Path

from hvfreeze.__main__ import main
from hvfreeze.runs.clock import SET_UP_PHASES


def test_the_summary_has_the_seconds_of_each_phase_of_the_set_up(tmp_path: Path) -> None:
    words = ["auto", "digits", "--model", "mlp-16x16", "--train-samples", "64", "--epochs", "1", "--quiet"]
    assert main([*words, "--run-dir", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["set_up_seconds"]
    assert tuple(found) == SET_UP_PHASES
    assert all(found[phase] > 0 for phase in SET_UP_PHASES if phase != "flips")
