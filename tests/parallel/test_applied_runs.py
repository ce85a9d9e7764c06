"""A job's model, applied by one process: it answers as all ranks together did in their last evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.standing import hvfreeze
from tests.program import call

pytestmark = [pytest.mark.mpi, pytest.mark.standing]

TRAIN = (
    *("train", "--model", "tests.kept.small_model:small", "--train-samples", "64", "--batch-size", "8"),
    *("--epochs", "2", "--lr", "0.01", "--augment", "none", "--freeze", "static", "--cut", "2", "--cache", "on"),
    "--quiet",
)


@pytest.mark.parametrize("size", [2])
def test_one_process_finds_the_accuracy_and_loss_of_all_ranks(size: int, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    result = hvfreeze(size, *TRAIN, "--run-dir", str(run))
    assert result.returncode == 0, str(result)
    outcome = call("evaluate", str(run), "--out", str(out), "--trust-code")
    assert outcome.returncode == 0 and "as the run reported" in outcome.stdout, str(outcome)
    summary, found = (json.loads(path.read_text()) for path in (run / "summary.json", out / "evaluation.json"))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["accuracy"] == summary["test_accuracy"] and found["samples"] == 359
    assert found["loss"] == pytest.approx(last["test_loss"], rel=1e-12)
    assert found["parameter_digest"] == summary["parameter_digest"]
