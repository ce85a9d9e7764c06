"""Runs of the program in which a fault is planted, and what they leave."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hvfreeze.runs import checkpoint_file as checkpoint
from tests.parallel import standing
from tests.parallel.mpirun import TIMED_OUT, Result, mpirun
from tests.program import Outcome

FAULTY = Path(__file__).with_name("workers") / "faulty.py"
# Four steps an epoch with two ranks, cut moved by schedule, a checkpoint after each epoch.
TRAINING = ["--model", "shufflenet_v2_x0_5", "--train-samples", "128", "--batch-size", "16", "--epochs", "3"]
TRAINING += ["--threads", "1", "--lr", "0.05", "--freeze", "linear", "--interval", "3", "--freeze-warmup", "3"]
TRAINING += ["--checkpoint-every", "1"]
IMPATIENT = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}


def train(n: int, faults: str, folder: Path, *more: str, **options: Any) -> Result:
    arguments = [faults, "train", *TRAINING, "--run-dir", str(folder), *more]
    result = mpirun(n, FAULTY, timeout=120, args=arguments, every_rank_reports=False, **options)
    assert result.returncode != TIMED_OUT, str(result)
    return result


def train_here(n: int, faults: str, folder: Path, *more: str) -> Result:
    """Train on the ranks of a standing job, with faults that end no process."""
    words = ["train", *TRAINING, "--run-dir", str(folder), *more]
    return standing.hvfreeze(n, *words, program=f"faulty:{faults}")


def messages(outcome: Result | Outcome) -> list[str]:
    return [
        line for line in outcome.stderr.splitlines() if line.startswith(("hvfreeze: error: ", "hvfreeze: stopped "))
    ]


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
