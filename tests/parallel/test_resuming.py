"""A job that is stopped by a signal or killed is resumed with the same or another number of ranks."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hvfreeze.runs import checkpoint_file as checkpoint
from tests.parallel.faulted import (
    TRAINING,
    checkpoints,
    epochs,
    only_message,
    seconds_since,
    summary,
    train,
    train_here,
)
from tests.program import call

SOON = 60
"""Seconds, on a machine that is busy; waiting for a rank that died would take the stall limit."""

pytestmark = [pytest.mark.mpi, pytest.mark.fault]


@pytest.mark.standing
@pytest.mark.parametrize("size", [2])
def test_a_run_that_is_stopped_in_every_way_ends_as_the_undisturbed_one(size: int, tmp_path: Path) -> None:
    straight, folder = tmp_path / "straight", tmp_path / "run"
    result = train_here(size, "-", straight)
    assert result.returncode == 0, str(result)

    asked_early = train_here(size, "0:-2:leave,1:-1:leave", folder)
    assert asked_early.returncode == 75, str(asked_early)
    assert re.search(r"continue from the last checkpoint \(step \d+\) with: mpirun -np 2 ", only_message(asked_early))
    assert checkpoints(folder, size=size) == [1]

    killed = train(size, "1:6:kill", folder, "--resume")
    assert killed.returncode == 128 + signal.SIGKILL, str(killed)
    assert seconds_since(tmp_path) < SOON
    assert checkpoints(folder, size=size) == [1, 4]
    assert not (folder / "summary.json").exists()

    resumed = train_here(size, "-", folder, "--resume")
    assert resumed.returncode == 0, str(resumed)
    for key in ("parameter_digest", "cut_history", "allreduce_bytes", "test_accuracy"):
        assert summary(folder)[key] == summary(straight)[key], key
    assert summary(folder)["final_cut"] > 0
    assert (folder / "decisions.jsonl").read_bytes() == (straight / "decisions.jsonl").read_bytes()
    assert epochs(folder) == epochs(straight)

    other_size = call("train", *TRAINING, "--run-dir", str(folder), "--resume")
    assert other_size.returncode == 3, str(other_size)
    assert "was written by 2 ranks and cannot resume bit for bit on 1" in only_message(other_size)


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


@pytest.mark.standing
@pytest.mark.seldom
@pytest.mark.parametrize("size", [2])
def test_another_number_of_ranks_goes_on_from_the_same_state_where_that_is_asked_for(size: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # An epoch has 4 steps on two ranks and 2 on three: the run continues at the same part of the epoch.
    stopped = train_here(size, "1:4:leave", folder)
    assert stopped.returncode == 75, str(stopped)
    found = [state_in(next((folder / "checkpoints").glob("*05.pt")))]
    asked = train(3, "2:2:leave", folder, "--resume", "--resume-inexact")
    assert asked.returncode == 75, str(asked)
    assert checkpoints(folder, size=3) == [2, 3]
    found += [state_in(path) for path in sorted((folder / "checkpoints").iterdir())]
    assert_goes_on_from(found[0], found[1])
    ended = train_here(size, "-", folder, "--resume", "--resume-inexact")
    assert ended.returncode == 0, str(ended)
    assert checkpoints(folder, size=size) == [8, 12]
    for result in (asked, ended):
        assert "note: changed since the run started: ranks: " in result.stdout, str(result)
    changes = [change for resumed in summary(folder)["resumed"] for change in resumed["changed"]]
    assert [change.partition(";")[0] for change in changes] == [
        f"ranks: {there} before, {here} now" for there, here in ((2, 3), (3, 2))
    ]
    for change, before, first in zip(changes, (found[0], found[2]), (2, 6), strict=True):
        assert f"step {before['step']} ({before['steps_per_epoch']} per epoch) became {first} (" in change
    assert json.loads((folder / "environment.json").read_text())["resumed"] == summary(folder)["resumed"]
    assert [line["epoch"] for line in epochs(folder)] == [0, 1, 2]
    assert (summary(folder)["steps"], summary(folder)["world_size"]) == (12, 2)
    steps = [step for _, step, _ in summary(folder)["cut_history"]]
    assert steps == sorted(steps) and steps[-1] <= 12 and summary(folder)["final_cut"] > 0
    # From there on it is a run of two ranks like any other.
    again = train_here(size, "-", folder, "--resume")
    assert again.returncode == 0 and "nothing to do" in again.stdout, str(again)
