"""Reads run directories: the settings, environment, metrics and votes of runs."""

from __future__ import annotations

import functools
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hvfreeze.config.freeze import AUTO
from hvfreeze.config.tree import convert, defaults_of, leaves
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.metrics import named_in
from hvfreeze.plain_yaml import parse_plain_yaml
from hvfreeze.rules import typed
from hvfreeze.runs.clock import PHASES, train_seconds


class Move(NamedTuple):
    """A change of the cut; in files the list [epoch, step, cut]."""

    epoch: int
    step: int
    """Optimizer steps before the change."""
    cut: int
    """Number of frozen blocks after it."""


TRAINING_PHASES = tuple(phase for phase in PHASES if phase != "evaluate")
METRICS = ("step", "cut", "test_accuracy", "train_seconds", "seconds", "images_per_second", "allreduce_bytes")
VOTE = ("step", "epoch", "proposals", "weights", "tally", "total", "quorum", "cut_before", "cut_after", "reason")
SUMMARY = ("test_accuracy", "best_test_accuracy", "train_seconds", "seconds", "images_per_second", "allreduce_bytes")

Kind = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Return True if a value of a file is a finite number in the range of a float."""
    return type(value) in (int, float) and abs(value) < 1e300


def is_count(value: Any) -> bool:
    """Return True if a value of a file is a whole number, 0 or more."""
    return type(value) is int and 0 <= value < 2**63


def is_text(value: Any) -> bool:
    """Return True if a value of a file is text."""
    return isinstance(value, str)


def or_none(kind: Kind) -> Kind:
    """Return a check for this kind of value or None."""
    return lambda value: value is None or kind(value)


def list_of(kind: Kind) -> Kind:
    """Return a check for lists of this kind of value."""
    return lambda value: isinstance(value, list) and all(map(kind, value))


def named(kind: Kind) -> Kind:
    """Return a check for objects whose values are all of this kind."""
    return lambda value: isinstance(value, dict) and all(map(kind, value.values()))


def with_keys(kinds: Mapping[str, Kind]) -> Kind:
    """Return a check for objects whose values are of these kinds, for the keys that exist."""
    return lambda value: isinstance(value, dict) and all(kinds[key](value[key]) for key in kinds if key in value)


IN_ENVIRONMENT: dict[str, Kind] = {
    "size": lambda value: is_count(value) and value > 0,
    "hosts": list_of(is_text),
    "versions": named(or_none(is_text)),
    "resumed": list_of(lambda value: with_keys({"changed": list_of(is_text)})(value) and "changed" in value),
}
BALANCE = ("test_balanced_accuracy", "test_majority_share")
"""Keys next to a test accuracy if classes are unbalanced."""
OF_MODEL = dict.fromkeys((*BALANCE, "test_accuracy", "test_loss", "train_accuracy", "train_loss"), or_none(is_number))
IN_METRICS: dict[str, Kind] = {
    **dict.fromkeys(("epoch", "step", "cut", "allreduce_bytes"), is_count),
    **dict.fromkeys(("train_seconds", "images_per_second"), is_number),
    "test_accuracy": or_none(is_number),
    "test_bits_per_character": or_none(is_number),
    **dict.fromkeys(BALANCE, or_none(is_number)),
    "seconds": named(is_number),
    "cache": with_keys({"mode": is_text}),
    "verb": is_text,
    "models": named(with_keys(OF_MODEL)),
}
IN_VOTE: dict[str, Kind] = {
    **dict.fromkeys(("step", "epoch", "cut_before", "cut_after"), is_count),
    **dict.fromkeys(("total", "quorum"), is_number),
    "reason": is_text,
    "proposals": list_of(is_count),
    "weights": list_of(is_number),
    "tally": list_of(is_number),
    "shadow": named(
        lambda value: with_keys({"cut": is_count, "proposals": list_of(is_count)})(value) and len(value) >= 2
    ),
    "gains": list_of(list_of(or_none(is_number))),
}
IN_SUMMARY: dict[str, Kind] = {
    "test_accuracy": or_none(is_number),
    **dict.fromkeys(("train_seconds", "images_per_second"), is_number),
    "seconds": named(is_number),
    **dict.fromkeys(("allreduce_bytes", "final_cut"), is_count),
    **dict.fromkeys(BALANCE, or_none(is_number)),
    "cut_history": list_of(lambda value: list_of(is_count)(value) and len(value) == 3),
}
"""Checks of the values in each file; other keys are not checked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The contents of a run directory."""

    name: str
    directory: Path
    config: dict[str, dict[str, Any]]
    """Settings by section and name, with defaults for missing ones."""
    environment: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]
    """Lines of metrics.jsonl, at least one: an epoch of training or another verb each."""
    decisions: tuple[dict[str, Any], ...]
    """Lines of decisions.jsonl, one per vote."""
    summary: dict[str, Any] | None
    """The content of summary.json; None if the run has not ended."""

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The settings by name; names are unique over all sections."""
        return {leaf: value for section in self.config.values() for leaf, value in section.items()}

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The lines of epochs of training."""
        return [line for line in self.metrics if "epoch" in line]

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.summary is not None

    @property
    def planned_epochs(self) -> int | None:
        """Planned epochs; None with hvfreeze auto or a time budget, which choose them later."""
        chosen_later = self.settings["freeze"] == AUTO or self.settings["time_budget"] != "none"
        return None if chosen_later else int(self.settings["epochs"])

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self.environment["size"])

    @property
    def test_accuracy(self) -> float:
        """Accuracy after the last evaluated epoch, 0-1; NaN without an evaluation.

        For a run that has ended it is the accuracy of its model, because hvfreeze auto may have returned to an earlier
        one.
        """
        if self.summary is not None:
            found = self.summary["test_accuracy"]
            return math.nan if found is None else float(found)
        return self.accuracies[-1] if self.accuracies else math.nan

    @property
    def balance(self) -> tuple[float | None, float | None]:
        """Balanced accuracy and the share of the majority class, for `test_accuracy`; None if classes are balanced."""
        balanced, majority = (self._evaluated.get(key) for key in BALANCE)
        return balanced, majority

    @property
    def measured(self) -> dict[str, float]:
        """The metrics by which models were compared, on the samples of `test_accuracy`, if others than accuracy."""
        found = named_in(self._evaluated, part="test")
        return found if found.keys() - {"accuracy", "balanced_accuracy"} else {}

    @property
    def _evaluated(self) -> dict[str, Any]:
        evaluated = [line for line in self.metrics if line.get("test_loss") is not None]
        return self.summary if self.summary is not None else evaluated[-1] if evaluated else {}

    @property
    def best_accuracy(self) -> float:
        """Best accuracy after any epoch or of the final model, 0-1; NaN if unknown."""
        return max([*self.accuracies, *([self.test_accuracy] if self.finished else ())], default=math.nan)

    @property
    def accuracies(self) -> list[float]:
        """Accuracies after the evaluated epochs."""
        return [float(line["test_accuracy"]) for line in self.metrics if line["test_accuracy"] is not None]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of rank 0 by phase, so far."""
        if self.summary is not None:
            return {phase: float(self.summary["seconds"].get(phase, 0.0)) for phase in PHASES}
        return {phase: sum(float(line["seconds"].get(phase, 0.0)) for line in self.metrics) for phase in PHASES}

    @property
    def train_seconds(self) -> float:
        """Seconds of training so far, without evaluation and set-up."""
        return float(self.summary["train_seconds"]) if self.summary is not None else train_seconds(self.seconds)

    @property
    def images_per_second(self) -> float:
        """Training throughput in images per second, over all ranks."""
        if self.summary is not None:
            return float(self.summary["images_per_second"])
        images = sum(line["images_per_second"] * line["train_seconds"] for line in self.metrics)
        return float(images / max(self.train_seconds, 1e-9))

    @property
    def allreduce_bytes(self) -> int:
        """Gradient bytes that one rank has sent to be averaged."""
        return int((self.summary or self.metrics[-1])["allreduce_bytes"])

    @property
    def final_cut(self) -> int:
        """The cut of the final model, or after the last epoch if the run has not ended."""
        return int((self.summary or {}).get("final_cut", self.metrics[-1]["cut"]))

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps per epoch; 1 if nothing is trained."""
        first = next(iter(self.epochs), {"step": 1, "epoch": 0})
        return float(first["step"]) / (int(first["epoch"]) + 1)

    @property
    def cut_history(self) -> list[Move]:
        """The cut at the start and after every change."""
        if self.summary is not None and self.summary.get("cut_history"):
            return [Move(int(epoch), int(step), int(cut)) for epoch, step, cut in self.summary["cut_history"]]
        moves = [d for d in self.decisions if d["cut_after"] != d["cut_before"]]
        first = moves[0]["cut_before"] if moves else self.final_cut
        return [Move(0, 0, first), *(Move(d["epoch"], d["step"], d["cut_after"]) for d in moves)]

    @property
    def is_baseline(self) -> bool:
        """Whether this is a finished run without freezing and cache, a baseline for others."""
        settings = self.settings
        plain = settings["freeze"] == "none" and settings["cache"] == "off" and settings["shadow"] == "none"
        return plain and self.finished and self.final_cut == 0


def printable(text: str) -> str:
    """Return text that any output can encode: undecodable bytes of file names become question marks."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def load_run(directory: str | os.PathLike[str]) -> Run:
    """Return the run in a directory; a run that has not ended has no summary.

    Raises RefusedError, which names the file, if the directory or a file in it is missing, damaged, another user's or
    has no epoch.
    """
    root = Path(directory)
    try:
        if not root.is_dir():
            raise RefusedError(f"run directory {root} does not exist")
        if not any((root / name).exists() for name in ("config.yaml", "environment.json", "metrics.jsonl")):
            raise RefusedError(f"{root} is not a run directory: it has no config.yaml; name the --run-dir of a run")
    except PermissionError as error:
        raise RefusedError(f"run directory {root} cannot be read ({error.strerror}); ask its owner") from error
    environment = read_object(root / "environment.json", ("size",))
    metrics = read_lines(root / "metrics.jsonl", METRICS)
    if not metrics:
        raise RefusedError(f"{root / 'metrics.jsonl'} has no epoch yet; run the report again after the first epoch")
    ended = root / "summary.json"
    run = Run(
        name=printable(root.resolve().name),
        directory=root,
        config=read_config(root / "config.yaml"),
        environment=environment,
        metrics=tuple(metrics),
        decisions=tuple(read_lines(root / "decisions.jsonl", VOTE)),
        summary=read_object(ended, SUMMARY) if ended.exists() else None,
    )
    check_values(run)
    return run


def check_values(run: Run) -> None:
    """Raise RefusedError, which names the file and key, if a value of a run has the wrong type."""
    files: list[tuple[str, Sequence[Mapping[str, Any]], Mapping[str, Kind]]] = [
        ("environment.json", [run.environment], IN_ENVIRONMENT),
        ("metrics.jsonl", run.metrics, IN_METRICS),
        ("decisions.jsonl", run.decisions, IN_VOTE),
        ("summary.json", [] if run.summary is None else [run.summary], IN_SUMMARY),
    ]
    for name, objects, kinds in files:
        for number, found in enumerate(objects, 1):
            place = f"{run.directory / name}" + (f" line {number}" if name.endswith("l") else "")
            for key, kind in kinds.items():
                if key in found and not kind(found[key]):
                    raise RefusedError(f"{place} is damaged: {key} has an invalid value ({repr(found[key])[:40]})")
    for number, line in enumerate(run.metrics, 1):
        place = f"{run.directory / 'metrics.jsonl'} line {number} is damaged"
        if "epoch" not in line and "verb" not in line:
            raise RefusedError(f"{place}: epoch is missing")
        if "epoch" in line and line["step"] < 1:
            raise RefusedError(f"{place}: step has an invalid value (0)")
    path = run.directory / "config.yaml"
    for leaf, (_, field, kind) in leaves().items():
        value = run.settings.get(leaf)
        try:
            if value is not None or (leaf in run.settings and field.default is not None):
                typed(leaf, value, kind, source=str(path))
        except UsageError as error:
            raise RefusedError(f"{path} is damaged: {error}") from error


def load_runs(directories: Iterable[str | os.PathLike[str]]) -> list[Run]:
    """Return the runs in the given order; see `named_apart`."""
    return named_apart([load_run(directory) for directory in directories])


def named_apart(runs: Iterable[Run]) -> list[Run]:
    """Return the runs, each once; equal names are prefixed with parent folders until they differ."""
    by_place = {run.directory.resolve(): run for run in runs}
    for depth in range(2, max((len(place.parts) for place in by_place), default=0) + 1):
        counts = Counter(run.name for run in by_place.values())
        for place, run in by_place.items():
            if counts[run.name] > 1:
                by_place[place] = replace(run, name=printable(str(Path(*place.parts[-depth:]))))
    return list(by_place.values())


def read_bytes(path: Path) -> bytes:
    """Return a file's bytes; raises RefusedError for a pipe or a device, which might never end."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RefusedError(f"{path} cannot be read: it is not a regular file")
            return file.read()
    except OSError as error:
        raise RefusedError(f"{path} cannot be read: {error.strerror}; is {path.parent} a run directory?") from error


def read_object(path: Path, wanted: Sequence[str]) -> dict[str, Any]:
    """Return a JSON file's object with the keys `wanted`; raises RefusedError for anything else."""
    return parse_object(read_bytes(path), str(path), wanted)


def read_lines(path: Path, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file with the keys `wanted`; raises RefusedError, which names the line."""
    text = read_bytes(path)
    lines = text.splitlines()
    if not text.endswith((b"\n", b"}")):
        lines = lines[:-1]  # still being written
    return [parse_object(line, f"{path} line {number}", wanted) for number, line in enumerate(lines, 1)]


def parse_object(text: bytes, place: str, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object in `text` with the keys `wanted`; raises RefusedError, which names the place."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{place} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise RefusedError(f"{place} is damaged: it is not a JSON object")
    missing = [key for key in wanted if key not in value]
    if missing:
        raise RefusedError(f"{place} is damaged: {missing[0]} is missing")
    return value


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """Return the configuration of config.yaml over the defaults; settings of other versions are kept."""
    try:
        tree = parse_plain_yaml(read_bytes(path))
    except ValueError as error:
        raise RefusedError(f"{path} is damaged: {error}") from error
    given = tree.pop("given", []) if isinstance(tree, dict) else None
    if not isinstance(given, list) or not all(isinstance(section, dict) for section in tree.values()):
        raise RefusedError(f"{path} is damaged: it must contain sections of settings")
    tree = convert(tree)
    default = defaults_of(tree)
    return {section: {**default.get(section, {}), **tree.get(section, {})} for section in {**default, **tree}}
