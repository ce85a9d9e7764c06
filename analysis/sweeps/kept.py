"""What is kept of a run: its small logs, without this machine's paths; and how they are read again.

RESULTS/<experiment>/runs/<run>/    config.yaml environment.json metrics.jsonl decisions.jsonl summary.json plan.json
                                    made.json

Training time is one thing in all experiments: seconds of rank 0 without set-up, evaluation and checkpoints. How often a
run is saved is a matter of taste, and not every rival can save itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from analysis.sweeps.presets import PlannedRun
from analysis.sweeps.provenance import stamp
from hvfreeze.errors import RefusedError
from hvfreeze.runs.reading import TRAINING_PHASES, Run, load_run

LOGS = ("config.yaml", "environment.json", "metrics.jsonl", "decisions.jsonl", "summary.json", "wire.json")
PLAN = "plan.json"
UNCOUNTED = "checkpoint"
"""The phase of a run that is no part of its training time here."""
COUNTED = tuple(phase for phase in TRAINING_PHASES if phase != UNCOUNTED)


def keep(run_dir: Path, planned: PlannedRun, kept: Path, *, source: str) -> None:
    """Copy a finished run's small logs to the folder `kept`, complete or not at all, without this machine's paths.

    Args:
        run_dir: the run directory.
        planned: what was started.
        kept: the folder, which is replaced.
        source: the commit that the run was started from.
    """
    part = kept.with_name(f".{kept.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in LOGS:
        if (run_dir / name).exists():
            shutil.copy(run_dir / name, part / name)
    tree = yaml.safe_load((part / "config.yaml").read_text(encoding="utf-8"))
    tree["data"]["data_dir"] = None
    tree["run"]["run_dir"] = None
    tree["model"]["weights"] = Path(tree["model"]["weights"]).name
    # So that runs which differ in these alone are never taken for repetitions of each other.
    tree["sweep"] = {"program": planned.program, "nodes": planned.nodes, "bandwidth": planned.bandwidth}
    (part / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    known = json.loads((part / "environment.json").read_text(encoding="utf-8"))
    names = {host: f"host{number}" for number, host in enumerate(dict.fromkeys(known.get("hosts", [])))}
    known["hosts"] = [names[host] for host in known.get("hosts", [])]
    (part / "environment.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    (part / PLAN).write_text(json.dumps(planned.identity(), indent=1) + "\n", encoding="utf-8")
    stamp(part, source=source)
    shutil.rmtree(kept, ignore_errors=True)
    os.replace(part, kept)


def kept_run(folder: Path) -> Run:
    """Return a kept run with the one definition of training time, in its summary and in every epoch."""
    run = load_run(folder)
    metrics = tuple(without_checkpoints(line) for line in run.metrics)
    summary = None if run.summary is None else without_checkpoints(run.summary)
    return dataclasses.replace(run, metrics=metrics, summary=summary)


def without_checkpoints(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return an epoch's line, or a summary, whose training time has no checkpoints in it."""
    seconds = {phase: value for phase, value in line["seconds"].items() if phase != UNCOUNTED}
    counted = sum(seconds.get(phase, 0.0) for phase in COUNTED)
    images = line["images_per_second"] * line["train_seconds"]
    return {**line, "seconds": seconds, "train_seconds": counted, "images_per_second": images / max(counted, 1e-9)}


def is_kept(planned: PlannedRun, kept: Path) -> bool:
    """Tell whether the run's logs are there already.

    Raises:
        RefusedError: another run's logs have its name; the message shows the difference.
    """
    if not (kept / "summary.json").exists() or not (kept / PLAN).exists():
        return False
    held, asked = flat(json.loads((kept / PLAN).read_text(encoding="utf-8"))), flat(planned.identity())
    names = sorted(key for key in held | asked if held.get(key) != asked.get(key))
    if names:
        shown = "; ".join(f"{name}: {held.get(name)!r} there, {asked.get(name)!r} here" for name in names)
        raise RefusedError(f"{kept} holds another run ({shown}); remove that folder, or give another --results")
    return True


def of_other_seeds(planned: Sequence[PlannedRun], directory: Path) -> list[str]:
    """Return the names of kept runs that differ from a planned one in the seed only, in the order of their seeds.

    Raises:
        RefusedError: a kept run has a planned run's label and is another; see `is_kept`.
    """
    names = {run.name for run in planned}
    found = {}
    for like in {run.label: run for run in planned}.values():
        for path in (directory / "runs").glob(f"{like.label}-s*/{PLAN}"):
            told = json.loads(path.read_text(encoding="utf-8"))
            other = dataclasses.replace(like, seed=told["seed"])
            if told["label"] == like.label and other.name not in names and is_kept(other, path.parent):
                found[other.name] = told["seed"]
    return sorted(found, key=lambda name: found[name])


def borrow(planned: PlannedRun, directory: Path) -> bool:
    """Copy the run's logs from another experiment that has made the same run; tell whether there was one."""
    for kept in sorted(directory.parent.glob(f"*/runs/{planned.name}")):
        if (kept / "summary.json").exists() and json.loads((kept / PLAN).read_text()) == planned.identity():
            own = directory / "runs" / planned.name
            part = own.with_name(f".{own.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(kept, part)
            part.rename(own)
            return True
    return False


def flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's identity without its inner level."""
    return {**{key: value for key, value in identity.items() if key != "flags"}, **identity["flags"]}
