"""Run directories as a training run leaves them, made up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hvfreeze.config.tree import from_dict, to_dict
from hvfreeze.report.comparison import Group, group_by_seed
from hvfreeze.runs.reading import load_runs

PHASES = {"data": 0.1, "forward": 1.0, "backward": 2.0, "allreduce": 0.4, "optimizer": 0.3, "vote": 0.05}
STEPS_PER_EPOCH = 10
IMAGES_PER_EPOCH = 640


def vote(
    step: int, *, before: int, after: int, proposals: list[int], weights: list[float], **more: Any
) -> dict[str, Any]:
    """A line of decisions.jsonl among six blocks."""
    tally = [round(sum(w for p, w in zip(proposals, weights) if p >= cut) * 2**20) for cut in range(6)]
    line = {"step": step, "epoch": step // STEPS_PER_EPOCH, "criterion": "gradient-norm", "proposals": proposals}
    line |= {"weights": weights, "tally": tally, "total": tally[0], "quorum": 0.5, "cut_before": before}
    return {**line, "cut_after": after, "reason": f"cut {after} it is", "shadow": {}, **more}


def write_run(
    directory: Path,
    *,
    accuracies: Sequence[float | None],
    speed: float = 1.0,
    size: int = 2,
    decisions: list[dict[str, Any]] | None = None,
    finished: bool = True,
    environment: dict[str, Any] | None = None,
    **flags: Any,
) -> Path:
    """Write a run of one epoch per accuracy, whose phases took 1/`speed` of those of the slowest run."""
    directory.mkdir(parents=True)
    if "time_budget" not in flags:
        flags.setdefault("epochs", len(accuracies))
    (directory / "config.yaml").write_text(yaml.safe_dump(to_dict(from_dict(flags)), sort_keys=False))
    hosts = {"size": size, "hosts": ["node0"] * size, "processor": "Some CPU", "cores": 2, "threads": 1}
    versions = {"versions": {"torch": "2.13.0", "horovod": "0.28.1", "hvfreeze": None}}
    (directory / "environment.json").write_text(json.dumps({**hosts, **versions, **(environment or {})}))
    decisions = decisions or []
    (directory / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in decisions))
    seconds = {phase: value / speed for phase, value in PHASES.items()}
    lines = []
    for epoch, accuracy in enumerate(accuracies):
        step = (epoch + 1) * STEPS_PER_EPOCH
        cut = max([0, *(line["cut_after"] for line in decisions if line["step"] <= step)])
        lines.append(metrics_line(epoch, step, cut, accuracy, seconds))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (directory / "summary.json").write_text(json.dumps(summary(lines, size)))
    return directory


def groups_of(folder: Path, runs: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    """Write runs, by name with their flags; return them in groups. A run has an epoch if no accuracies are given."""
    return group_by_seed(
        load_runs([write_run(folder / name, **{"accuracies": [0.1], **flags}) for name, flags in runs.items()])
    )


def metrics_line(epoch: int, step: int, cut: int, accuracy: float | None, seconds: dict[str, float]) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    line: dict[str, Any] = {"epoch": epoch, "step": step, "cut": cut, "train_loss": 0.5, "train_accuracy": 0.5}
    spent = sum(seconds.values())
    line |= {
        "test_loss": 0.6,
        "test_accuracy": accuracy,
        "train_seconds": spent,
        "seconds": {**seconds, "evaluate": 0.2},
    }
    line |= {"images_per_second": IMAGES_PER_EPOCH / spent, "allreduce_bytes": 1_000_000 * step}
    return {**line, "cache": {"mode": "off"}}


def summary(lines: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """summary.json's object after these epochs."""
    last = lines[-1]
    seconds = {phase: sum(line["seconds"][phase] for line in lines) for phase in last["seconds"]}
    spent = sum(line["train_seconds"] for line in lines)
    found = {"test_accuracy": last["test_accuracy"], "epochs": len(lines), "steps": last["step"], "world_size": size}
    found |= {"best_test_accuracy": max(line["test_accuracy"] or 0.0 for line in lines), "train_seconds": spent}
    found |= {"seconds": seconds, "images_per_second": IMAGES_PER_EPOCH * len(lines) / spent}
    cuts = [[0, 0, 0]]
    for line in lines:
        if line["cut"] != cuts[-1][2]:
            cuts.append([line["epoch"], line["step"], line["cut"]])
    return {**found, "allreduce_bytes": last["allreduce_bytes"], "final_cut": last["cut"], "cut_history": cuts}
