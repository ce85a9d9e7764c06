"""Kept runs, and the rows that are made of them.

RESULTS/<experiment>/runs.jsonl     a line a run: plan, source, environment, configuration, summary, epochs, votes
RESULTS/environments.json           machines and versions by their digests
RESULTS/presets.json                each experiment's defaults, around which one factor at a time is changed

A row has plain numbers: seconds, bytes, accuracies 0-1. Training time is one thing in all experiments: seconds of rank
0 without set-up, evaluation and checkpoints. How often a run is saved is a matter of taste, and not every rival can
save itself. This is the one place that reads what runs of earlier sources have left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from analysis.sweeps.presets import PlannedRun
from hvfreeze.comm.reducer import UNCOMPRESSED_STEPS
from hvfreeze.config.tree import convert, defaults_of
from hvfreeze.errors import RefusedError
from hvfreeze.runs.reading import TRAINING_PHASES, Run, check_values

RESULTS = Path(__file__).resolve().parents[1] / "results"
RUNS, ENVIRONMENTS, PRESETS = "runs.jsonl", "environments.json", "presets.json"
UNCOUNTED = "checkpoint"
"""The phase of a run that is no part of its training time here."""
COUNTED = tuple(phase for phase in TRAINING_PHASES if phase != UNCOUNTED)
IDENTITY = tuple(field.name for field in dataclasses.fields(PlannedRun))
VERSIONS = ("torch", "horovod", "mpi4py", "hvfreeze")
DIGEST = 16
"""Digits of a digest that a row holds: enough to tell trainings apart."""
SETTINGS = "model validation_fraction image_size epochs batch_size lr augment freeze cut signal cache".split()
"""The settings that a row has."""

Row = dict[str, Any]
Line = dict[str, Any]


class KeptRuns:
    """The kept runs in an experiment's folder, as they were when this was opened or last added to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / RUNS
        self.lines = read_lines(self.path)
        self.environments = by_name(directory.parent / ENVIRONMENTS)

    def holds(self, planned: PlannedRun) -> bool:
        """Return True if the run is recorded.

        Raises:
            RefusedError: another run with its name is recorded; the message shows the difference.
        """
        if planned.name not in self.lines:
            return False
        held, asked = (flat(identity) for identity in (self.lines[planned.name], planned.identity()))
        names = sorted(key for key in held | asked if held.get(key) != asked.get(key))
        if names:
            shown = "; ".join(f"{name}: {held.get(name)!r} before, {asked.get(name)!r} now" for name in names)
            raise RefusedError(
                f"{self.path} holds another run {planned.name} ({shown}); remove its line, or give another --results"
            )
        return True

    def check_seeds(self, planned: Sequence[PlannedRun]) -> None:
        """Raise RefusedError if recorded runs with a run's label differ from it in more than the seed.

        Raises:
            RefusedError: they differ; see `holds`.
        """
        like = {run.label: run for run in planned}
        for line in self.lines.values():
            if line["label"] in like:
                self.holds(dataclasses.replace(like[line["label"]], seed=line["seed"]))

    def keep(self, run_dir: Path, planned: PlannedRun, *, source: str, whole_seconds: float | None = None) -> None:
        """Add the finished run of a run directory, without this machine's paths.

        Args:
            run_dir: where the run has left its logs.
            planned: the run.
            source: the commit that it was started from.
            whole_seconds: seconds of the whole command; None if it was not timed.
        """
        environment = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
        names = {host: f"host{number}" for number, host in enumerate(dict.fromkeys(environment.get("hosts", [])))}
        environment["hosts"] = [names[host] for host in environment.get("hosts", [])]
        tree = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        tree["data"]["data_dir"] = tree["run"]["run_dir"] = tree["cache"]["cache_dir"] = None
        tree["model"]["weights"] = Path(tree["model"]["weights"]).name
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        line: Line = {"run": planned.name, **planned.identity()}
        # Older runs are stamped "history": their source and time are the repository's.
        line |= {"commit": source, "finished": now, "stamped": "run", "environment": digest_of(environment)}
        line |= {"config": tree, "summary": json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))}
        for key, name in (("epochs", "metrics.jsonl"), ("votes", "decisions.jsonl")):
            line[key] = [json.loads(text) for text in (run_dir / name).read_text(encoding="utf-8").splitlines()]
        if (run_dir / "wire.json").exists():
            line["wire"] = json.loads((run_dir / "wire.json").read_text(encoding="utf-8"))
        if whole_seconds is not None:
            line["whole_seconds"] = round(whole_seconds, 3)
        root = self.directory.parent
        with locked(root):
            known = by_name(root / ENVIRONMENTS)
            if line["environment"] not in known:
                publish_by_name(root / ENVIRONMENTS, {**known, line["environment"]: environment})
        self.append(line)

    def append(self, line: Line) -> None:
        """Write a line behind the others; one that was cut short by a crash is replaced."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(self.directory.parent), self.path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines, self.environments = read_lines(self.path), by_name(self.directory.parent / ENVIRONMENTS)

    def borrow(self, planned: PlannedRun) -> bool:
        """Take the run over from another experiment that has made the same one; tell whether there was one."""
        for lines in self._elsewhere:
            line = lines.get(planned.name)
            if line and {key: line[key] for key in IDENTITY} == planned.identity():
                self.append(line)
                return True
        return False

    @functools.cached_property
    def _elsewhere(self) -> list[dict[str, Line]]:
        return [read_lines(path) for path in sorted(self.directory.parent.glob(f"*/{RUNS}"))]

    def run(self, name: str) -> Run:
        """Return a kept run with the one definition of training time, in its summary and in every epoch.

        Raises:
            RefusedError: no such run is kept, its environment is not, or it is damaged.
        """
        if name not in self.lines:
            raise RefusedError(f"{self.path} holds no run {name}")
        line, environment = self.lines[name], self.environments.get(self.lines[name]["environment"])
        if environment is None:
            raise RefusedError(f"{self.directory.parent / ENVIRONMENTS} lacks {line['environment']}, of run {name}")
        # So that runs which differ in these alone are never taken for repetitions of each other.
        tree = convert(line["config"]) | {"sweep": {key: line[key] for key in ("program", "nodes", "bandwidth")}}
        default = usual(*(str(tree.get(key, {}).get(key)) for key in ("strategy", "optimizer")))
        run = Run(
            name=name,
            directory=self.directory / name,
            config={key: {**default.get(key, {}), **tree.get(key, {})} for key in {**default, **tree}},
            environment=environment,
            metrics=tuple(without_checkpoints(epoch) for epoch in line["epochs"]),
            decisions=tuple(line["votes"]),
            summary=without_checkpoints(line["summary"]),
        )
        check_values(run)
        return run

    def rows(self) -> list[Row]:
        """Return a row for each run."""
        return [row_of(line, self.run(name)) for name, line in self.lines.items()]


@functools.cache
def usual(strategy: str, optimizer: str) -> dict[str, dict[str, Any]]:
    """Return the defaults of all settings, which a strategy and an optimizer have; they are the same for most runs."""
    return defaults_of({"strategy": {"strategy": strategy}, "optimizer": {"optimizer": optimizer}})


def read_lines(path: Path) -> dict[str, Line]:
    """Return the kept runs of a file by name; a last line that was cut short by a crash counts as not there.

    Raises:
        RefusedError: a line is damaged; names it.
    """
    found: dict[str, Line] = {}
    whole = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")[0]
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(text)
            found[line["run"]] = line
        except (ValueError, TypeError, KeyError) as error:
            raise RefusedError(
                f"{path} line {number} is damaged: {error}; remove it, and its run is made again"
            ) from error
    return found


def by_name(path: Path) -> dict[str, Line]:
    """Return the entries of `ENVIRONMENTS` or `PRESETS`, none where the file is absent."""
    known: dict[str, Line] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return known


def publish_by_name(path: Path, entries: Mapping[str, Line]) -> None:
    """Replace `ENVIRONMENTS` or `PRESETS`; the results' lock must be held from the reading on."""
    publish(path, json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


def digest_of(environment: Line) -> str:
    """Return the name of an environment."""
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:8]


def machine_of(environment: Line) -> str:
    """Return the machine of an environment: two of them are one where processor, cores and system are the same."""
    known = f"{environment.get('processor')}, {environment.get('cores')} cores"
    system = str(environment.get("system") or "").partition("-x86_64")[0].replace("Linux-", "Linux ")
    return f"{known}, {system}" if system else known


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of all results below a folder, so that sweeps side by side write one after another."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def without_checkpoints(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return an epoch's line, or a summary, whose training time has no checkpoints in it."""
    seconds = {phase: value for phase, value in line["seconds"].items() if phase != UNCOUNTED}
    counted = sum(seconds.get(phase, 0.0) for phase in COUNTED)
    images = line["images_per_second"] * line["train_seconds"]
    return {**line, "seconds": seconds, "train_seconds": counted, "images_per_second": images / max(counted, 1e-9)}


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's identity without its inner level."""
    return {**{key: line[key] for key in IDENTITY if key != "flags"}, **line["flags"]}


def row_of(line: Line, run: Run) -> Row:
    """Return a kept run as plain numbers. `step_*` are seconds of rank 0 per step, in the epochs after `unlike`."""
    summary, settings, environment = line["summary"], run.settings, run.environment
    cache = summary.get("cache") or {}
    cached = ("exact", "bytes", "rows_written", "rows_read", "seconds_saved_predicted", "seconds_saved")
    return {
        "run": run.name,
        **{key: line[key] for key in ("label", "seed", "program", "ranks", "nodes")},
        "bandwidth": line["bandwidth"] or None,
        **{name: settings.get(name) for name in SETTINGS},
        "test_accuracy": run.test_accuracy,
        "train_seconds": run.train_seconds,
        **{key: line[key] for key in ("whole_seconds",) if key in line},
        "steps": int(run.metrics[-1]["step"]),
        "images_per_second": run.images_per_second,
        "allreduce_bytes": run.allreduce_bytes,
        "final_cut": run.final_cut,
        "cut_history": " ".join(f"{move.cut}@{move.step}" for move in run.cut_history),
        **{f"cache_{key}": cache.get(key) for key in cached},
        **{f"seconds_{phase}": run.seconds[phase] for phase in COUNTED},
        f"seconds_{UNCOUNTED}": float(summary["seconds"].get(UNCOUNTED, 0.0)),
        **steady_columns(run),
        "wire_bytes_per_step": wire_bytes_per_step(line.get("wire", {}), run),
        "parameter_digest": (summary.get("parameter_digest") or "")[:DIGEST] or None,
        **{key: line.get(key) for key in ("commit", "finished", "stamped")},
        **{key: environment.get(key) for key in ("processor", "cores", "threads")},
        **{name: environment.get("versions", {}).get(name) for name in VERSIONS},
    }


def unlike(run: Run) -> int:
    """Return the number of a run's first epochs to exclude from timing; at least one epoch is timed.

    These are the first one, which initializes memory and libraries, and the epochs before low rank sets in.
    """
    steps = UNCOMPRESSED_STEPS if run.settings["compression"].startswith("powersgd") else 0
    begun = 1 + next((place for place, line in enumerate(run.metrics) if line["step"] > steps), 0)
    return min(begun, len(run.metrics) - 1)


def steady_columns(run: Run) -> Row:
    """Return seconds per step by phase over the epochs after `unlike`, over all where there is one only."""
    left_out = unlike(run)
    first, lines = (run.metrics[left_out - 1]["step"] if left_out else 0), run.metrics[left_out:]
    steps = max(1, lines[-1]["step"] - first)
    columns = {phase: sum(line["seconds"].get(phase, 0.0) for line in lines) / steps for phase in COUNTED}
    return {"step_seconds": sum(columns.values()), **{f"step_{phase}": value for phase, value in columns.items()}}


def wire_bytes_per_step(wire: Mapping[str, Mapping[str, int]], run: Run) -> float | None:
    """Return the bytes that the busiest node sent per step after `unlike` epochs, None if they were not counted."""
    sent = {int(epochs): nodes for epochs, nodes in wire.items()}
    first, last = min((epochs for epochs in sent if epochs >= unlike(run)), default=0), max(sent, default=0)
    if not 0 < first < last:
        return None
    steps = run.metrics[last - 1]["step"] - run.metrics[first - 1]["step"]
    return float(max(sent[last][node] - sent[first][node] for node in sent[last]) / steps)


def publish(path: Path, text: str) -> None:
    """Replace a file at once, so that readers never see half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def commit() -> str:
    """Return the commit of the source, with "-dirty" where files differ from it; empty where that is not known."""
    try:
        known = git("rev-parse", "--short", "HEAD").strip()
        # Results change while they are being made.
        changed = git("status", "--porcelain", "--", ":/", ":!/analysis/results", ":!/README.md", ":!/docs").strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{known}-dirty" if changed else known


def git(*arguments: str) -> str:
    """Return what git says about this source."""
    where = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout
