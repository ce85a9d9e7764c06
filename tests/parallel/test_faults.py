"""What becomes of a job when a rank dies, hangs, fails or goes astray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.parallel.faulted import (
    IMPATIENT,
    TRAINING,
    checkpoints,
    epochs,
    messages,
    only_message,
    summary,
    train,
)
from tests.program import call

pytestmark = [pytest.mark.mpi, pytest.mark.fault]


def test_evaluating_less_often_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    for name, every in (("often", "1"), ("seldom", "2")):
        result = train(3, "-", tmp_path / name, "--evaluate-every", every)
        assert result.returncode == 0, str(result)
    often, seldom = epochs(tmp_path / "often"), epochs(tmp_path / "seldom")
    assert [line["test_accuracy"] is None for line in seldom] == [True, False, False]
    assert seldom[1:] == often[1:]
    assert {**often[0], "test_loss": None, "test_accuracy": None} == seldom[0]
    for key in ("parameter_digest", "test_accuracy", "cut_history"):
        assert summary(tmp_path / "seldom")[key] == summary(tmp_path / "often")[key], key


def test_an_exception_on_one_rank_is_shown_first_and_ends_ranks_that_wait_or_compute(tmp_path: Path) -> None:
    result = train(3, "1:3:raise,2:3:spin", tmp_path / "run")
    assert result.returncode == 1, str(result)
    lines = result.stderr.splitlines()
    first = next(number for number, line in enumerate(lines) if "failed" in line or "Traceback" in line)
    assert lines[first : first + 2] == ["hvfreeze: rank 1 of 3 failed", "Traceback (most recent call last):"], str(
        result
    )
    assert "RuntimeError: injected" in lines, str(result)
    assert result.stderr.count("Traceback") == 1, str(result)
    assert not messages(result), str(result)


@pytest.mark.parametrize(("fault", "code"), [("exit", 3), ("segfault", 128 + signal.SIGSEGV), ("interrupt", 130)])
def test_a_rank_that_dies_ends_the_job(tmp_path: Path, fault: str, code: int) -> None:
    result = train(2, f"0:6:{fault}", tmp_path / "run")
    assert result.returncode == code, str(result)
    assert checkpoints(tmp_path / "run", size=2) == [4]


def assert_waited_no_longer_than_it_may(said: str) -> None:
    match = re.search(r"waited (\d+) s in", said)
    assert match and int(match[1]) <= int(IMPATIENT["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]) + 10, said


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_stopped_rank_ends_the_job_at_the_deadline(culprit: int, tmp_path: Path) -> None:
    result = train(2, f"{culprit}:3:stop", tmp_path / "run", env=IMPATIENT)
    assert result.returncode == 6, str(result)
    said = only_message(result)
    assert f"for rank {culprit} on " in said and "which gives no sign of life" in said
    assert "in 'step.signals'" in said or "in 'gradients." in said
    assert_waited_no_longer_than_it_may(said)


@pytest.mark.parametrize(("size", "culprit"), [(2, 0), (3, 2)])
def test_a_rank_that_is_stopped_when_the_run_is_complete_ends_the_job_which_stays_complete(
    size: int, culprit: int, tmp_path: Path
) -> None:
    folder, straight = tmp_path / "run", tmp_path / "straight"
    undisturbed = train(size, "-", straight, "--epochs", "1")
    assert undisturbed.returncode == 0, str(undisturbed)
    result = train(size, f"{culprit}:-4:stop", folder, "--epochs", "1", env=IMPATIENT)
    assert result.returncode == 128 + signal.SIGKILL, str(result)
    assert f"rank {culprit} on " in only_message(result) and "after it had left MPI" in only_message(result)
    assert epochs(folder) == epochs(straight)
    for name in ("model.pt", "decisions.jsonl"):
        assert (folder / name).read_bytes() == (straight / name).read_bytes(), name
    again = train(size, "-", folder, "--epochs", "1", "--resume")
    assert again.returncode == 0 and "is complete; nothing to do" in again.stdout + again.stderr, str(again)
    assert summary(folder)["parameter_digest"] == summary(straight)["parameter_digest"]


def test_a_rank_that_does_not_come_ends_the_job_at_the_deadline(tmp_path: Path) -> None:
    result = train(3, "1:3:spin", tmp_path / "run", env=IMPATIENT)
    assert result.returncode == 6, str(result)
    said = only_message(result)
    assert "s in 'step.signals' for rank 1 on " in said and "which computes" in said
    assert_waited_no_longer_than_it_may(said)


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_in_the_same_step(tmp_path: Path) -> None:
    result = train(2, "1:6:loss", tmp_path / "run")
    assert result.returncode == 5, str(result)
    assert "step 6: the loss is not finite on 1 of 2 ranks; no update was made" in only_message(result)
    assert checkpoints(tmp_path / "run", size=2) == [4]


def test_a_replica_that_differs_in_one_bit_is_found_and_named(tmp_path: Path) -> None:
    result = train(3, "1:1:perturb", tmp_path / "run")
    assert result.returncode == 4, str(result)
    assert "replicas are not equal after step 2: rank 1 differ" in only_message(result)
    assert not checkpoints(tmp_path / "run", size=3)


def test_a_frozen_parameter_that_moves_ends_the_job_in_that_step(tmp_path: Path) -> None:
    result = train(2, "1:9:move-frozen", tmp_path / "run")
    assert result.returncode == 4, str(result)
    assert "rank 1: " in only_message(result) and "frozen" in only_message(result)
    assert [line["cut"] for line in epochs(tmp_path / "run")][-1] > 0, "nothing was frozen, so nothing was shown"
    assert checkpoints(tmp_path / "run", size=2) == [4, 8]


def test_ranks_that_freeze_differently_are_refused_before_an_update(tmp_path: Path) -> None:
    result = train(2, "1:6:freeze-alone", tmp_path / "run")
    assert result.returncode == 4, str(result)
    assert "ranks disagree on which parameters are frozen" in only_message(result)
    assert checkpoints(tmp_path / "run", size=2) == [4]


def test_a_vote_on_statistics_that_are_not_finite_on_one_rank_is_void(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = train(2, "1:0:statistics", folder, "--freeze", "percentile", "--eta-max", "inf", "--interval", "1")
    assert result.returncode == 0, str(result)
    decisions = [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]
    assert decisions
    for decision in decisions:
        assert "gradients are not finite on rank 1: the vote is void" in decision["reason"]
        assert (decision["cut_before"], decision["cut_after"], decision["total"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("0:6:log", "metrics.jsonl cannot be written: No space left on device"),
        ("1:6:refuse", "error: rank 1: injected"),
    ],
)
def test_an_error_that_only_one_rank_meets_ends_the_job(tmp_path: Path, fault: str, message: str) -> None:
    result = train(2, fault, tmp_path / "run")
    assert result.returncode == 3, str(result)
    assert message in only_message(result)
    assert checkpoints(tmp_path / "run", size=2) == [4]


def test_ranks_with_different_versions_are_refused(tmp_path: Path) -> None:
    result = train(2, "1:-2:versions", tmp_path / "run")
    assert result.returncode == 2, str(result)
    said = only_message(result)
    assert "ranks were started with different versions" in said
    assert "'0.1' on rank 1" in said
    assert not (tmp_path / "run").exists()


def test_ranks_with_different_sources_are_refused(tmp_path: Path) -> None:
    result = train(2, "1:-2:sources", tmp_path / "run")
    assert result.returncode == 2, str(result)
    said = only_message(result)
    assert "ranks were started with different versions: source is" in said
    assert "'other' on rank 1" in said
    assert not (tmp_path / "run").exists()


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
