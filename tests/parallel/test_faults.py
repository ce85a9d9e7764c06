"""What becomes of a job when a rank dies, hangs, fails or goes astray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.parallel import standing
from tests.parallel.faulted import (
    FAULTY,
    IMPATIENT,
    TRAINING,
    checkpoints,
    epochs,
    messages,
    only_message,
    summary,
    train,
    train_here,
)
from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import seldom
from tests.program import call

pytestmark = [pytest.mark.mpi, pytest.mark.fault]

NEIGHBOURS = ["--model", "resnet20", "--train-samples", "80", "--validation-fraction", "0.2", "--batch-size", "16"]
NEIGHBOURS += ["--epochs", "2", "--threads", "1", "--lr", "0.05", "--checkpoint-every", "1", "--json"]
"""A run of a strategy whose ranks wait for their neighbours."""


def test_an_exception_on_one_rank_is_shown_first_and_ends_ranks_that_compute(tmp_path: Path) -> None:
    result = train(2, "1:3:raise,0:3:spin", tmp_path / "run")
    assert result.returncode == 1, str(result)
    lines = result.stderr.splitlines()
    first = next(number for number, line in enumerate(lines) if "failed" in line or "Traceback" in line)
    start = ["hvfreeze: rank 1 of 2 failed", "Traceback (most recent call last):"]
    assert lines[first : first + 2] == start and "RuntimeError: injected" in lines, str(result)
    assert result.stderr.count("Traceback") == 1 and not messages(result), str(result)


@pytest.mark.seldom
def test_a_rank_that_is_interrupted_ends_the_job(tmp_path: Path) -> None:
    result = train(2, "0:6:interrupt", tmp_path / "run")
    assert result.returncode == 130, str(result)
    assert checkpoints(tmp_path / "run", size=2) == [4]


@pytest.mark.standing
@pytest.mark.parametrize(
    ("size", "fault", "code", "words", "kept"),
    [
        (2, "1:6:loss", 5, ["step 6: the loss is NaN or Inf on 1 of 2 ranks; the model was not updated"], [4]),
        (3, "1:1:perturb", 4, ["replicas differ after step 2: rank 1 differ"], []),
        (2, "1:6:freeze-alone", 4, ["ranks disagree on which parameters are frozen"], [4]),
        (2, "1:-2:sources", 2, ["different versions: source is", "'other' on rank 1"], None),
    ],
)
def test_a_rank_that_goes_astray_ends_the_job_with_one_message(
    tmp_path: Path, size: int, fault: str, code: int, words: list[str], kept: list[int] | None
) -> None:
    result = train_here(size, fault, tmp_path / "run")
    assert result.returncode == code, str(result)
    said = only_message(result)
    assert not [each for each in words if each not in said], str(result)
    if kept is None:
        assert not (tmp_path / "run").exists()
    else:
        assert checkpoints(tmp_path / "run", size=size) == kept


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("0:6:log", 3, "metrics.jsonl cannot be written: No space left on device"),
        seldom("1:9:move-frozen", 4, "frozen"),
    ],
)
def test_an_error_that_one_rank_alone_meets_is_the_jobs(tmp_path: Path, fault: str, code: int, words: str) -> None:
    result = train(2, fault, tmp_path / "run")
    said = only_message(result)
    assert result.returncode == code and words in said and f"error: rank {fault[0]}: " in said, str(result)
    assert checkpoints(tmp_path / "run", size=2) == [4, 8][: code - 2]
    if code == 4:
        assert epochs(tmp_path / "run")[-1]["cut"] > 0, "nothing was frozen, so nothing was shown"


@pytest.mark.standing
@pytest.mark.parametrize("size", [2])
def test_a_rank_that_is_stopped_when_the_run_is_complete_ends_the_job_which_stays_complete(
    size: int, tmp_path: Path
) -> None:
    folder, straight = tmp_path / "run", tmp_path / "straight"
    undisturbed = train_here(size, "-", straight, "--epochs", "1")
    assert undisturbed.returncode == 0, str(undisturbed)
    result = train(size, "1:-4:stop", folder, "--epochs", "1", env=IMPATIENT)
    assert result.returncode == 128 + signal.SIGKILL, str(result)
    told = r"hvfreeze: error: rank 1 on \S+ has left MPI, but has been suspended for (\d+) s"
    match = re.match(told, only_message(result))
    assert match and int(match[1]) >= int(*IMPATIENT.values()), str(result)
    assert epochs(folder) == epochs(straight)
    for name in ("model.pt", "decisions.jsonl"):
        assert (folder / name).read_bytes() == (straight / name).read_bytes(), name
    again = train_here(size, "-", folder, "--epochs", "1", "--resume")
    assert again.returncode == 0 and "is complete; nothing to do" in again.stdout + again.stderr, str(again)
    assert summary(folder)["parameter_digest"] == summary(straight)["parameter_digest"]


@pytest.mark.standing
@pytest.mark.parametrize("size", [2])
def test_a_vote_on_statistics_that_are_not_finite_on_one_rank_is_void(size: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = train_here(
        size, "1:0:statistics", folder, "--freeze", "percentile", "--eta-max", "inf", "--interval", "1", "--epochs", "1"
    )
    assert result.returncode == 0, str(result)
    decisions = [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]
    assert decisions
    for decision in decisions:
        assert "NaN or Inf in the gradients of rank 1; this vote does not count" in decision["reason"]
        assert (decision["cut_before"], decision["cut_after"], decision["total"]) == (0, 0, 0)


def test_a_full_disk_leaves_the_older_checkpoints(tmp_path: Path) -> None:
    # Room for two checkpoints of 3 MB, not for three.
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    try:
        outcome = call("train", *TRAINING, "--run-dir", str(tmp_path / "run"))
        assert outcome.returncode == 3, str(outcome)
        said = only_message(outcome)
        assert "step-00000024.pt cannot be written (No space left on device)" in said
        assert checkpoints(tmp_path / "run", size=1) == [8, 16]
        assert not [name for name in os.listdir(tmp_path / "run" / "checkpoints") if name.startswith(".")]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def of(strategy: str, folder: Path, *more: str) -> list[str]:
    """Return the command line of a run of a strategy whose ranks wait for their neighbours, or for rounds to end."""
    own = ["--model", "mlp-16x9", "--batch-size", "4", "--local-steps", "3"] if strategy == "subnets" else []
    return ["train", *NEIGHBOURS, *own, "--strategy", strategy, "--run-dir", str(folder), *more]


def test_a_rank_with_numbers_that_are_not_finite_ends_the_job_in_the_middle_of_a_round(tmp_path: Path) -> None:
    # The round has more steps than the run, and the other rank never comes to its end.
    arguments = ["1:3:loss,0:3:spin", *of("local-sgd", tmp_path / "run", "--local-steps", "9")]
    result = mpirun(2, FAULTY, timeout=100, args=arguments, every_rank_reports=False)
    assert result.returncode == 5, str(result)
    said = only_message(result)
    assert "error: rank 1: step 3: the loss is NaN or Inf; the model was not updated" in said, str(result)
    assert checkpoints(tmp_path / "run", size=2) == [2]


@pytest.mark.seldom
@pytest.mark.parametrize("strategy", ["shared-trunk"])
def test_where_ranks_wait_for_neighbours_one_that_does_not_come_ends_the_job(strategy: str, tmp_path: Path) -> None:
    arguments = ["1:2:stop", *of(strategy, tmp_path / "run")]
    result = mpirun(2, FAULTY, timeout=100, args=arguments, every_rank_reports=False)
    assert result.returncode == 6, str(result)
    assert re.search(r"waited \d+ s in 'wire\.\S.*' for rank 1( on \S+)?, which does not respond", only_message(result))


@pytest.mark.standing
@pytest.mark.seldom
@pytest.mark.parametrize("strategy", ["grid", "shared-trunk"])
@pytest.mark.parametrize("size", [3])
def test_where_ranks_wait_for_neighbours_a_run_that_is_asked_to_leave_goes_on(
    strategy: str, size: int, tmp_path: Path
) -> None:
    straight, folder = tmp_path / "straight", tmp_path / "run"
    undisturbed = standing.hvfreeze(size, *of(strategy, straight), program="faulty:-")
    assert undisturbed.returncode == 0, str(undisturbed)
    asked = standing.hvfreeze(size, *of(strategy, folder), program="faulty:1:5:leave")
    assert asked.returncode == 75 and "stopped after step 6 of 8" in only_message(asked), str(asked)
    resumed = standing.hvfreeze(size, *of(strategy, folder, "--resume"), program="faulty:-")
    assert json.loads(resumed.stdout.splitlines()[-1]) == summary(folder)
    assert summary(folder)["parameter_digest"] == summary(straight)["parameter_digest"]
