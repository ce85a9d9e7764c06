"""A rank that dies, does not come or is asked to leave, in strategies whose ranks wait for their neighbours."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.parallel.faulted import FAULTY, IMPATIENT, only_message
from tests.parallel.mpirun import TIMED_OUT, Result, mpirun

TRAINING = ["--model", "resnet20", "--train-samples", "80", "--validation-fraction", "0.2", "--batch-size", "16"]
TRAINING += ["--epochs", "2", "--threads", "1", "--lr", "0.05", "--checkpoint-every", "1", "--json"]

pytestmark = [pytest.mark.mpi, pytest.mark.fault]


def train(strategy: str, faults: str, folder: Path, *more: str, **options: object) -> Result:
    arguments = [faults, "train", *TRAINING, "--strategy", strategy, "--run-dir", str(folder), *more]
    result = mpirun(3, FAULTY, timeout=100, args=arguments, every_rank_reports=False, **options)  # type: ignore[arg-type]
    assert result.returncode != TIMED_OUT, str(result)
    return result


@pytest.mark.parametrize("strategy", ["grid", "shared-trunk"])
def test_a_rank_that_dies_or_does_not_come_ends_the_job_with_its_name(strategy: str, tmp_path: Path) -> None:
    killed = train(strategy, "1:2:kill", tmp_path / "killed")
    assert killed.returncode == 128 + signal.SIGKILL, str(killed)
    assert "rank 1" in killed.stderr, str(killed)
    late = train(strategy, "1:2:spin", tmp_path / "late", env=IMPATIENT)
    assert late.returncode == 6 and " for rank 1" in only_message(late), str(late)


@pytest.mark.torture
@pytest.mark.parametrize("strategy", ["grid", "shared-trunk"])
def test_a_run_that_is_asked_to_leave_goes_on_as_if_it_had_not_been(strategy: str, tmp_path: Path) -> None:
    straight, folder = tmp_path / "straight", tmp_path / "run"
    undisturbed = train(strategy, "-", straight)
    assert undisturbed.returncode == 0, str(undisturbed)
    asked = train(strategy, "1:5:leave", folder)
    assert asked.returncode == 75 and "stopped after step 6 of 8" in only_message(asked), str(asked)
    resumed = train(strategy, "-", folder, "--resume")
    summary = json.loads(resumed.stdout.splitlines()[-1])
    assert summary == json.loads((folder / "summary.json").read_text())
    assert summary["parameter_digest"] == json.loads((straight / "summary.json").read_text())["parameter_digest"]
