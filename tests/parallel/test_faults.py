"""What becomes of a job when a rank dies, hangs, fails or goes astray, or when somebody asks it to leave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hvfreeze.training.checkpoints import file as checkpoint
from tests.parallel.mpirun import TIMED_OUT, Result, environment, mpirun
from tests.program import Outcome, call

FAULTY = Path(__file__).with_name("workers") / "faulty.py"
# Four steps an epoch with two ranks, cut moved by schedule, a checkpoint after each epoch.
TRAINING = ["--model", "shufflenet_v2_x0_5", "--train-samples", "128", "--batch-size", "16", "--epochs", "3"]
TRAINING += ["--threads", "1", "--lr", "0.05", "--freeze", "linear", "--interval", "3", "--freeze-warmup", "3"]
TRAINING += ["--checkpoint-every", "1"]
IMPATIENT = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}

pytestmark = [pytest.mark.mpi, pytest.mark.fault]


def train(n: int, faults: str, folder: Path, *more: str, **options: Any) -> Result:
    arguments = [faults, "train", *TRAINING, "--run-dir", str(folder), *more]
    result = mpirun(n, FAULTY, timeout=120, args=arguments, every_rank_reports=False, **options)
    assert result.returncode != TIMED_OUT, str(result)
    return result


def messages(outcome: Result | Outcome) -> list[str]:
    return [line for line in outcome.stderr.splitlines() if line.startswith("hvfreeze: error: ")]


def only_message(outcome: Result | Outcome) -> str:
    said = messages(outcome)
    assert len(said) == 1, str(outcome)
    assert "Traceback" not in outcome.stderr, str(outcome)
    return said[0]


def checkpoints(folder: Path, *, size: int) -> list[int]:
    """The steps of the checkpoints, each of which loads."""
    steps = []
    for path in sorted((folder / "checkpoints").glob("step-*.pt")):
        opened = checkpoint.open_checkpoint(path, size=size)
        assert checkpoint.path_of(path.parent, opened.step) == path
        assert checkpoint.unpacked(opened.section(0), name=str(path))["step"] == opened.step
        steps.append(opened.step)
    return steps


def seconds_since(folder: Path) -> float:
    """From the fault to the end of the job, of which no process is left."""
    return time.time() - float((folder / "since").read_text())


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def epochs(folder: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "train_seconds", "images_per_second", "cache")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


@pytest.mark.timeout(900)
def test_a_run_that_is_stopped_in_every_way_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    straight, folder = tmp_path / "straight", tmp_path / "run"
    result = train(2, "-", straight)
    assert result.returncode == 0, str(result)

    asked_early = train(2, "0:-3:leave,1:-1:leave", folder)
    assert asked_early.returncode == 75, str(asked_early)
    assert "stopped after step 1 of 12; go on with --resume" in only_message(asked_early)
    assert checkpoints(folder, size=2) == [1]

    killed = train(2, "1:6:kill", folder, "--resume")
    assert killed.returncode == 128 + signal.SIGKILL, str(killed)
    assert seconds_since(tmp_path) < 5
    assert checkpoints(folder, size=2) == [1, 4]
    assert not (folder / "summary.json").exists()

    # Fresh, where a rank signals its launcher: that is the parent of a process of its own, not of a copy.
    asked = train(2, "0:6:ask-launcher", folder, "--resume", fresh=True)
    assert asked.returncode == 75, str(asked)
    assert "stopped after step 7 of 12; go on with --resume" in only_message(asked)
    assert checkpoints(folder, size=2) == [4, 7]

    terminated = train(2, "1:9:terminate-launcher", folder, "--resume", fresh=True)
    assert terminated.returncode not in (0, 75), str(terminated)
    assert seconds_since(tmp_path) < 5
    assert checkpoints(folder, size=2) == [7, 8]

    resumed = train(2, "-", folder, "--resume")
    assert resumed.returncode == 0, str(resumed)
    for key in ("parameter_digest", "cut_history", "allreduce_bytes", "test_accuracy"):
        assert summary(folder)[key] == summary(straight)[key], key
    assert summary(folder)["final_cut"] > 0
    assert (folder / "decisions.jsonl").read_bytes() == (straight / "decisions.jsonl").read_bytes()
    assert epochs(folder) == epochs(straight)

    other_size = train(1, "-", folder, "--resume")
    assert other_size.returncode == 3, str(other_size)
    assert "was written by 2 ranks and cannot resume on 1" in only_message(other_size)


def state_in(path: Path) -> dict[str, Any]:
    """What ranks share, and as `own` what each has."""
    opened = checkpoint.open_checkpoint(path, size=None)
    shared, *own = (checkpoint.unpacked(opened.section(number), name=str(path)) for number in range(opened.size + 1))
    return {**shared, "own": own}


def assert_goes_on_from(before: dict[str, Any], after: dict[str, Any]) -> None:
    learnt = [name for name in before["model"] if "running_" not in name]
    assert all(torch.equal(after["model"][name], before["model"][name]) for name in learnt)
    momenta = [
        [state["momentum_buffer"] for _, state in sorted(there["optimizer"]["state"].items())]
        for there in (before, after)
    ]
    assert len(momenta[0]) == len(momenta[1]) > 0 and all(map(torch.equal, *momenta))
    # Running statistics are those of all ranks' batches together: the law of total variance.
    columns = [
        torch.stack(column).double() for column in zip(*(own["statistics"] for own in before["own"]), strict=True)
    ]
    for place, (means, variances) in enumerate(zip(columns[::2], columns[1::2], strict=True)):
        variance = variances.mean(0) + means.var(0, correction=0)
        for own in after["own"]:
            torch.testing.assert_close(own["statistics"][2 * place], means.mean(0).float())
            torch.testing.assert_close(own["statistics"][2 * place + 1], variance.float())


def test_another_number_of_ranks_goes_on_from_the_same_state_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # Epochs of 4 steps with two ranks, 2 with three and 8 with one: each goes on at the same part of the epoch.
    stopped = train(2, "1:4:leave", folder)
    assert stopped.returncode == 75, str(stopped)
    told = []
    for size, fault, first, last in ((3, "2:2:leave", 2, 3), (1, "0:13:leave", 12, 14), (2, "-", 7, 12)):
        before = state_in(sorted((folder / "checkpoints").iterdir())[-1])
        result = train(size, fault, folder, "--resume", "--resume-inexact")
        assert result.returncode == (75 if fault != "-" else 0), str(result)
        found = checkpoints(folder, size=size)
        if fault != "-":
            assert found == [first, last]
            assert_goes_on_from(before, state_in(sorted((folder / "checkpoints").iterdir())[0]))
        told.append(f"step {before['step']} of {before['steps_per_epoch']} an epoch became {first} of")
        assert "note: not as before: ranks: " in result.stdout, str(result)
    changes = [change for resumed in summary(folder)["resumed"] for change in resumed["changed"]]
    assert [change.partition(";")[0] for change in changes] == [
        f"ranks: {there} there, {here} here" for there, here in ((2, 3), (3, 1), (1, 2))
    ]
    assert all(where in change for where, change in zip(told, changes, strict=True)), changes
    assert json.loads((folder / "environment.json").read_text())["resumed"] == summary(folder)["resumed"]
    assert [line["epoch"] for line in epochs(folder)] == [0, 1, 2]
    ended = summary(folder)
    assert (ended["steps"], ended["world_size"]) == (12, 2)
    steps = [step for _, step, _ in ended["cut_history"]]
    assert steps == sorted(steps) and steps[-1] <= 12 and ended["final_cut"] > 0
    # From there on it is a run of two ranks like any other.
    again = train(2, "-", folder, "--resume")
    assert again.returncode == 0 and "nothing to do" in again.stdout, str(again)


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


def test_a_lone_process_that_is_terminated_goes_on_where_it_stopped(tmp_path: Path) -> None:
    straight, folder = tmp_path / "straight", tmp_path / "run"
    undisturbed = call("train", *TRAINING, "--run-dir", str(straight))
    assert undisturbed.returncode == 0, str(undisturbed)
    terminated = subprocess.run(
        [sys.executable, str(FAULTY), "0:9:terminate", "train", *TRAINING, "--run-dir", str(folder)],
        env=environment({}, out=tmp_path, timeout=120),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    outcome = Outcome(terminated.returncode, terminated.stdout, terminated.stderr)
    assert outcome.returncode == 75, str(outcome)
    assert "stopped after step 10 of 24" in only_message(outcome)
    resumed = call("train", *TRAINING, "--run-dir", str(folder), "--resume")
    assert resumed.returncode == 0, str(resumed)
    assert summary(folder)["parameter_digest"] == summary(straight)["parameter_digest"]


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
