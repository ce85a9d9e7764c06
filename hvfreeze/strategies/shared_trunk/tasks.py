"""The tasks: each model's target, its labels, and its own settings.

`--heads N` makes N models for the data set's own labels. `--tasks FILE` takes a table, CSV, with a column `sample` (a
row's number, or for image folders its path), where training and test set both occur a column `split` (`train` or
`test`), and a column for each task:

    split,sample,species,background
    train,0,owl,forest

or YAML that names such a table, beside itself, and says more:

    labels: labels.csv
    tasks:
      species: {head: linear, lr: 0.05}
      rough: {column: background, head: 2, loss: balanced, seed: 7}

Without `labels` all tasks have the data set's own labels.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvfreeze.config.sections import OptimizerConfig
from hvfreeze.data.batches import Batch, Corpus
from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.folders import meant_by
from hvfreeze.data.images import FileSource
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.plain_yaml import MOST_BYTES, parse_plain_yaml
from hvfreeze.strategies.shared_trunk.settings import SharedTrunkConfig
from hvfreeze.wording import plural

LOSSES = ("cross-entropy", "balanced")
MOST_TABLE_BYTES = 2**30
MOST_NAMED = 8
MOST_SHOWN = 80
"""Characters of a line."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One model's target and its own settings."""

    name: str
    column: str = ""
    """Of the table of labels; empty for the data set's own."""
    blocks: int = 1
    """The last blocks, which are the model's own."""
    lr: float
    seed: int
    """Of its own blocks and of their dropout."""
    loss: str = "cross-entropy"


def read_files(path: Path) -> tuple[str, str]:
    """Return the text of a task file, empty for a CSV, and of the table that it names, which for a CSV is itself.

    Raises:
        RefusedError: a file cannot be read.
        UsageError: it is no plain YAML.
    """
    if path.suffix == ".csv":
        return "", read_table(path)
    text = read(path, MOST_BYTES)
    named = parsed(text, path).get("labels")
    return text, "" if named is None else read_table(path.parent / str(named))


def read_table(path: Path) -> str:
    """Return a CSV file's text, whose lines end as Python's do, or refuse the file."""
    text = read(path, MOST_TABLE_BYTES).replace("\r\n", "\n").replace("\r", "\n")
    lines = csv.reader(io.StringIO(text))
    try:
        header = next(lines, [])
        for _ in lines:
            pass
    except csv.Error as error:
        raise RefusedError(f"--tasks: line {lines.line_num} of {path} is no CSV: {error}") from error
    if "sample" not in header:
        raise RefusedError(
            f"--tasks: the first line of {path} must name the columns, with commas and no spaces between them, as in "
            f"split,sample,species; it is {text.partition(chr(10))[0][:MOST_SHOWN]!r}"
        )
    return text


def read(path: Path, most_bytes: int) -> str:
    """Return a file's text, or refuse the file."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise RefusedError(f"--tasks: {path} is longer than {most_bytes} bytes")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise RefusedError(f"--tasks: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RefusedError(f"--tasks: {path} is no UTF-8 text: {error.reason}") from error


def parsed(text: str, path: Path) -> dict[str, Any]:
    """Return a YAML task file's keys and values."""
    try:
        tree = parse_plain_yaml(text.encode())
    except ValueError as error:
        raise UsageError(f"--tasks ({path}) is not plain YAML: {error}") from error
    tasks = tree.get("tasks") if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or set(tree) - {"labels", "tasks"} or not isinstance(tasks, dict) or not tasks:
        raise UsageError(f"--tasks ({path}) must have the key tasks, by name, and may have labels, a CSV file's name")
    return tree


def tasks_of(
    settings: SharedTrunkConfig, optimizer: OptimizerConfig, *, seed: int, ranks: int, files: tuple[str, str]
) -> list[Task]:
    """Return the run's tasks in order, with the learning rate and seeds from `seed` on unless they say otherwise.

    `files` is the result of `read_files`, empty texts without --tasks.

    Raises:
        UsageError: the task file sets a value that no task can have.
    """
    lr = optimizer.lr
    given = optimizer.head_rates() or [lr]
    blocks = settings.head_blocks
    if settings.tasks is None:
        count = settings.heads or ranks
        rates = given * count if len(given) == 1 else given
        if len(rates) != count:
            raise UsageError(
                f"--head-lr ({optimizer.head_lr}) has {plural(len(rates), 'number')} for {plural(count, 'head')}; give "
                "one each, or one for all"
            )
        return [Task(name=f"head{i}", blocks=blocks, lr=rate, seed=seed + i) for i, rate in enumerate(rates)]
    text, table = files
    if not text:
        header = next(csv.reader(io.StringIO(table)), [])
        named: dict[str, Any] = {name: {} for name in header if name not in ("split", "sample")}
    else:
        named = parsed(text, Path(settings.tasks))["tasks"]
    if not named:
        raise UsageError(f"--tasks ({settings.tasks}) names no task: give each a column beside `sample`")
    tasks = [
        task_of(str(name), entry or {}, Task(name=str(name), blocks=blocks, lr=lr, seed=seed + i), table=bool(table))
        for i, (name, entry) in enumerate(named.items())
    ]
    if len({task.name.lower() for task in tasks}) < len(tasks):
        raise UsageError(f"--tasks ({settings.tasks}) names a task twice")
    return tasks


def task_of(name: str, entry: Any, default: Task, *, table: bool) -> Task:
    """Return the task that a YAML entry describes."""

    def refuse(what: str) -> UsageError:
        return UsageError(f"--tasks: task {name}: {what}")

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise refuse("its name must be letters, digits and _.-, for it names a file")
    if not isinstance(entry, Mapping) or set(entry) - {"column", "head", "lr", "loss", "seed"}:
        raise refuse("it may have column, head, lr, loss and seed, and nothing else")
    if "column" in entry and not table:
        raise refuse("it has a column, but the file names no labels")
    head, lr, seed = entry.get("head", default.blocks), entry.get("lr", default.lr), entry.get("seed", default.seed)
    blocks = 1 if head == "linear" else head
    if type(blocks) is not int or blocks < 1:
        raise refuse(f"head ({head}) must be linear, or the number of last blocks that are its own")
    if type(lr) not in (int, float) or not (math.isfinite(lr) and lr > 0):
        raise refuse(f"lr ({lr}) must be a positive number")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise refuse(f"seed ({seed}) must be in 0..2^63-1")
    loss = entry.get("loss", default.loss)
    if loss not in LOSSES:
        raise refuse(f"loss ({loss}) must be one of {', '.join(LOSSES)}")
    column = str(entry.get("column", name)) if table else ""
    return Task(name=name, column=column, blocks=blocks, lr=float(lr), seed=seed, loss=loss)


def check_depths(tasks: list[Task], chain: Chain) -> None:
    """Refuse heads that leave nothing for the trunk."""
    names = [block.name for block in chain.blocks]
    for task in tasks:
        if task.blocks >= len(names):
            raise UsageError(
                f"model {task.name}: its own last blocks ({task.blocks}) must be 1..{len(names) - 1} of "
                f"{', '.join(names)}, so that a trunk is left"
            )


@dataclass(frozen=True, eq=False)
class Labels:
    """A task's classes, and the class of every sample that the run uses."""

    classes: tuple[str, ...]
    train: Tensor = field(repr=False)
    """(N,) int64 by sample id; -1 where the run does not use the sample."""
    test: Tensor = field(repr=False)

    def weights(self, loss: str) -> Tensor | None:
        """Return each class's weight, (classes,), or None for 1; `balanced` is N / (classes x samples of the class)."""
        if loss != "balanced":
            return None
        counts = torch.bincount(self.train[self.train >= 0], minlength=len(self.classes)).float()
        return counts.sum() / (len(counts) * counts.clamp(min=1))

    def of(self, batch: Batch, *, training: bool) -> Tensor:
        """Return the labels of a training or an evaluation batch, (B,) int64."""
        return (self.train if training else self.test)[torch.from_numpy(batch.ids)]

    def identity(self) -> str:
        """Return a digest, equal for equal classes and labels."""
        digest = hashlib.sha256(repr(self.classes).encode())
        digest.update(self.train.numpy().data)
        digest.update(self.test.numpy().data)
        return digest.hexdigest()


def read_labels(tasks: list[Task], table: str, corpus: Corpus) -> list[Labels]:
    """Return each task's labels; `table` is the CSV's text, empty where all have the data set's own.

    Raises:
        RefusedError: a sample of the run has no label, or two; a label that no training sample has; or the table names
            a sample that does not exist.
    """
    own = Labels(corpus.train.classes, corpus.train.labels, corpus.evaluated.labels)
    if not table:
        return [own] * len(tasks)
    reader = csv.DictReader(io.StringIO(table))
    header = reader.fieldnames or ()
    columns = set(header)
    if len(columns) < len(header):
        twice = next(name for name in header if list(header).count(name) > 1)
        raise RefusedError(f"--tasks: the table of labels has two columns {twice}; leave one, or rename one")
    for column in ("sample", *(task.column for task in tasks)):
        if column not in columns:
            raise RefusedError(
                f"--tasks: the table of labels has no column {column}; it has {', '.join(sorted(columns))}"
            )
    sets = {"train": corpus.train, "test": corpus.evaluated}
    rows_of = {split: rows_by_name(image_set) for split, image_set in sets.items()}
    cells: dict[str, dict[int, dict[str, str]]] = {"train": {}, "test": {}}
    for number, line in enumerate(reader, 2):
        if None in line:
            raise RefusedError(
                f"--tasks: line {number} of the table has more cells than the {len(header)} columns; take the others "
                "out, or put a label with a comma in quotation marks"
            )
        split = line.get("split") or "train"
        # The run evaluates on training samples that it holds out.
        if split == "test" and corpus.evaluated is corpus.train:
            continue
        row = rows_of.get(split, {}).get(meant_by(line["sample"] or ""))
        if row is None:
            raise RefusedError(f"--tasks: line {number} of the table: there is no sample {line['sample']} in {split}")
        before = cells[split].setdefault(row, line)
        for task in tasks:
            first, second = ((each.get(task.column) or "").strip() for each in (before, line))
            if first != second:
                raise RefusedError(
                    f"--tasks: line {number} of the table: sample {line['sample']} of {split} has a label already, "
                    f"{first or 'none'} in {task.column}, and here it is {second or 'none'}; leave one"
                )
    if corpus.evaluated is corpus.train:
        cells["test"] = cells["train"]
    used = {"train": np.concatenate(corpus.plan.shards), "test": corpus.evaluated_ids}
    return [column_of(task, cells, used, sets) for task in tasks]


def rows_by_name(image_set: ImageSet) -> dict[str, int]:
    """Return each sample's row by what a table may call it: its number, and for an image file its path."""
    rows = {str(row): row for row in range(len(image_set))}
    if isinstance(image_set.source, FileSource):
        rows |= {meant_by(path): row for row, path in enumerate(image_set.source.paths)}
    return rows


def column_of(
    task: Task,
    cells: Mapping[str, Mapping[int, Mapping[str, str]]],
    used: Mapping[str, np.ndarray],
    sets: Mapping[str, ImageSet],
) -> Labels:
    """Return one task's labels of the samples that are used."""
    words: dict[str, dict[int, str]] = {}
    for split, ids in used.items():
        said = {row: cells[split].get(row, {}).get(task.column) or "" for row in ids.tolist()}
        words[split] = {row: meant_by(word.strip()) for row, word in said.items()}
        lacking = [row for row, word in words[split].items() if not word]
        if lacking:
            source = sets[split].source
            name = source.paths[lacking[0]] if isinstance(source, FileSource) else lacking[0]
            others = f", nor have {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise RefusedError(
                f"--tasks: task {task.name}: sample {name} of {split} has no label in {task.column}{others}; give "
                "every sample of the run one"
            )
    # The table may have lines of training samples that the run leaves out.
    taught = set(words["train"].values())
    unknown = sorted(set(words["test"].values()) - taught)
    if unknown:
        raise RefusedError(
            f"--tasks: task {task.name}: {', '.join(unknown[:MOST_NAMED])} in {task.column} of test is the label of no "
            f"training sample of the run, of which {', '.join(sorted(taught)[:MOST_NAMED])} are; correct it or take it "
            "out"
        )
    known = {word for split in words.values() for word in split.values()}
    classes = sorted(known, key=lambda word: (not word.isdecimal(), int(word) if word.isdecimal() else 0, word))
    if len(classes) < 2:
        raise RefusedError(
            f"--tasks: task {task.name}: column {task.column} has one value only; a task needs two or more"
        )
    number = {word: index for index, word in enumerate(classes)}
    tensors = []
    for split in ("train", "test"):
        labels = torch.full((len(sets[split]),), -1, dtype=torch.int64)
        for row, word in words[split].items():
            labels[row] = number[word]
        tensors.append(labels)
    return Labels(tuple(classes), tensors[0], tensors[1])


def identity_of(tasks: list[Task], labels: list[Labels]) -> list[dict[str, Any]]:
    """Return what a checkpoint must have been made for."""
    return [{**asdict(task), "labels": each.identity()} for task, each in zip(tasks, labels, strict=True)]
