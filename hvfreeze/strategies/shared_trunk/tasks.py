"""Tasks: each model's labels and settings.

`--heads N` trains N models on the labels of the data set. `--tasks FILE` takes a table (CSV, TSV or Parquet) with a
column `sample` (a row number, or for image folders the path), a column `split` (`train` or `test`) if the table has
both sets, and a column for each task:

    split,sample,species,background
    train,0,owl,forest

or YAML with the path of such a table, relative to itself, and more settings:

    labels: labels.csv
    tasks:
      species: {head: linear, lr: 0.05}
      rough: {column: background, head: 2, loss: balanced, seed: 7}

Without `labels` all tasks use the labels of the data set.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.data.batches import Batch, Corpus
from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.folders import meant_by
from hvfreeze.data.images import FileSource
from hvfreeze.data.table_files import PARQUET, Table, read_table
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.plain_yaml import MOST_BYTES, parse_plain_yaml
from hvfreeze.strategies.shared_trunk.settings import SharedTrunkConfig
from hvfreeze.wording import first_few, plural

LOSSES = ("cross-entropy", "balanced")
TABLES = (".csv", ".tsv", PARQUET)
"""Suffixes of tables; other files are YAML."""
Files = tuple[dict[str, Any], Table | None]
"""The entries of a task file by task, and the table with the labels, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One model's labels and settings."""

    name: str
    column: str = ""
    """Column of the label table; empty for the labels of the data set."""
    blocks: int = 1
    """Number of last blocks that the model trains itself."""
    lr: float
    seed: int
    """Seed of its own blocks and of their dropout."""
    loss: str = "cross-entropy"


def read_files(path: Path) -> Files:
    """Return the tasks and the table of a task file; a table has a task for each of its columns.

    Raises:
        RefusedError: a file cannot be read, or is no table.
        UsageError: it cannot be parsed as YAML.
    """
    check_exists(path)
    if path.suffix.lower() in TABLES:
        table = read_table(path)
        return {name: {} for name in table.names if name not in ("split", "sample")}, table
    try:
        with path.open("rb") as file:
            tree = parse_plain_yaml(file.read(MOST_BYTES + 1))
    except OSError as error:
        raise RefusedError(f"--tasks: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--tasks ({path}) cannot be parsed as YAML: {error}") from error
    tasks = tree.get("tasks") if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or set(tree) - {"labels", "tasks"} or not isinstance(tasks, dict) or not tasks:
        raise UsageError(
            f"--tasks ({path}) must have the key tasks, a mapping of task names, and may have the key "
            "labels, the path of a table"
        )
    if tree.get("labels") is None:
        return tasks, None
    check_exists(path.parent / str(tree["labels"]))
    return tasks, read_table(path.parent / str(tree["labels"]))


def check_exists(path: Path) -> None:
    """Raise RefusedError if there is no such file."""
    if not path.exists():
        raise RefusedError(f"--tasks: {path} does not exist; name a table (CSV, TSV, Parquet) or a YAML file")


def tasks_of(
    settings: SharedTrunkConfig, optimizer: OptimizerConfig, *, seed: int, ranks: int, files: Files = ({}, None)
) -> list[Task]:
    """Return the run's tasks in order, with default learning rate and seeds counted from `seed`.

    `files` is the result of `read_files` with --tasks.

    Raises:
        UsageError: the task file has an invalid value.
    """
    lr = optimizer.lr
    given = optimizer.head_rates() or [lr]
    blocks = settings.head_blocks
    if settings.tasks is None:
        count = settings.heads or ranks
        rates = given * count if len(given) == 1 else given
        if len(rates) != count:
            raise UsageError(
                f"--head-lr ({optimizer.head_lr}) has {plural(len(rates), 'number')} for {plural(count, 'head')}; "
                "give one per head, or one for all"
            )
        return [Task(name=f"head{i}", blocks=blocks, lr=rate, seed=seed + i) for i, rate in enumerate(rates)]
    named, table = files
    if not named:
        raise UsageError(f"--tasks ({settings.tasks}) names no task; add a column for each task next to `sample`")
    tasks = [
        task_of(
            str(name),
            entry or {},
            Task(name=str(name), blocks=blocks, lr=lr, seed=seed + i),
            labelled=table is not None,
        )
        for i, (name, entry) in enumerate(named.items())
    ]
    if len({task.name.lower() for task in tasks}) < len(tasks):
        raise UsageError(f"--tasks ({settings.tasks}) names a task twice; task names must be unique, ignoring case")
    return tasks


def task_of(name: str, entry: Any, default: Task, *, labelled: bool) -> Task:
    """Return the task that a YAML entry describes."""

    def refuse(what: str) -> UsageError:
        return UsageError(f"--tasks: task {name}: {what}")

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise refuse("its name must consist of letters, digits and _.-, because it names a file")
    if not isinstance(entry, Mapping) or set(entry) - {"column", "head", "lr", "loss", "seed"}:
        raise refuse("it may only have the keys column, head, lr, loss and seed")
    if "column" in entry and not labelled:
        raise refuse("it names a column, but the file has no key labels")
    head, lr, seed = entry.get("head", default.blocks), entry.get("lr", default.lr), entry.get("seed", default.seed)
    blocks = 1 if head == "linear" else head
    if type(blocks) is not int or blocks < 1:
        raise refuse(f"head ({head}) must be linear, or the number of last blocks that the task trains itself")
    if type(lr) not in (int, float) or not (math.isfinite(lr) and lr > 0):
        raise refuse(f"lr ({lr}) must be a positive number")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise refuse(f"seed ({seed}) must be in 0..2^63-1")
    loss = entry.get("loss", default.loss)
    if loss not in LOSSES:
        raise refuse(f"loss ({loss}) must be one of {', '.join(LOSSES)}")
    column = str(entry.get("column", name)) if labelled else ""
    return Task(name=name, column=column, blocks=blocks, lr=float(lr), seed=seed, loss=loss)


def check_depths(tasks: list[Task], chain: Chain) -> None:
    """Raise UsageError if a head takes every block, leaving an empty trunk."""
    names = [block.name for block in chain.blocks]
    for task in tasks:
        if task.blocks >= len(names):
            raise UsageError(
                f"model {task.name}: the number of its own last blocks ({task.blocks}) must be in 1..{len(names) - 1}, "
                f"so that the trunk keeps a block; the blocks are {', '.join(names)}"
            )


@dataclass(frozen=True, eq=False)
class Labels:
    """A task's classes, and the class of every sample of the run."""

    classes: tuple[str, ...]
    train: Tensor = field(repr=False)
    """Class numbers, (N,) int64 by sample id; -1 if the run does not use the sample."""
    test: Tensor = field(repr=False)

    def weights(self, loss: str) -> Tensor | None:
        """Return class weights, (classes,), or None for 1; `balanced` is N / (classes x samples of the class)."""
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


def read_labels(tasks: list[Task], table: Table | None, corpus: Corpus) -> list[Labels]:
    """Return each task's labels; without a table they are those of the data set.

    Raises:
        RefusedError: a sample of the run has no label, or two; a test label that no training sample has; or the table
            lacks a column, or names a sample that does not exist.
    """
    if table is None:
        return [Labels(corpus.train.classes, corpus.train.labels, corpus.evaluated.labels)] * len(tasks)
    for name in ("sample", *(task.column for task in tasks)):
        if table.names.count(name) != 1:
            raise RefusedError(
                f"--tasks: {table.path} must have one column {name}, but its columns are {first_few(table.names)}"
            )
    sets = {"train": corpus.train, "test": corpus.evaluated}
    rows_of = {split: rows_by_name(image_set) for split, image_set in sets.items()}
    columns = {task.column: table.column(task.column) for task in tasks}
    splits = table.column("split") if "split" in table.names else [""] * len(table)
    lines: dict[str, dict[int, int]] = {"train": {}, "test": {}}
    for line, (split, sample) in enumerate(zip(splits, table.column("sample"), strict=True)):
        split = split or "train"
        # The run evaluates on training samples that it holds out.
        if split == "test" and corpus.evaluated is corpus.train:
            continue
        row = rows_of.get(split, {}).get(meant_by(sample))
        if row is None:
            raise RefusedError(f"{table.place(line, 'sample')}: {split} has no sample {sample}")
        before = lines[split].setdefault(row, line)
        for column, cells in columns.items():
            if cells[before] != cells[line]:
                raise RefusedError(
                    f"{table.place(line, column)}: sample {sample} of {split} already has the label "
                    f"{cells[before] or 'none'}, and {cells[line] or 'none'} here; keep one"
                )
    if corpus.evaluated is corpus.train:
        lines["test"] = lines["train"]
    used = {"train": np.concatenate(corpus.plan.shards), "test": corpus.evaluated_ids}
    return [column_of(task, columns[task.column], lines, used, sets) for task in tasks]


def rows_by_name(image_set: ImageSet) -> dict[str, int]:
    """Return each sample's row by its names in a table: its number and, for an image file, its path."""
    rows = {str(row): row for row in range(len(image_set))}
    if isinstance(image_set.source, FileSource):
        rows |= {meant_by(path): row for row, path in enumerate(image_set.source.paths)}
    return rows


def column_of(
    task: Task,
    cells: Sequence[str],
    lines: Mapping[str, Mapping[int, int]],
    used: Mapping[str, np.ndarray],
    sets: Mapping[str, ImageSet],
) -> Labels:
    """Return one task's labels of the used samples, whose cells are in `lines` of its column."""
    words: dict[str, dict[int, str]] = {}
    for split, ids in used.items():
        found = lines[split]
        words[split] = {row: meant_by(cells[found[row]]) if row in found else "" for row in ids.tolist()}
        lacking = [row for row, word in words[split].items() if not word]
        if lacking:
            source = sets[split].source
            name = source.paths[lacking[0]] if isinstance(source, FileSource) else lacking[0]
            others = f", nor do {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise RefusedError(
                f"--tasks: task {task.name}: sample {name} of {split} has no label in column {task.column}{others}; "
                "label every sample of the run"
            )
    # The table may have training samples that the run does not use.
    taught = set(words["train"].values())
    unknown = sorted(set(words["test"].values()) - taught)
    if unknown:
        raise RefusedError(
            f"--tasks: task {task.name}: {first_few(unknown)} in column {task.column} of the test "
            f"samples is not the label of any training sample; those are {first_few(sorted(taught))}. "
            "Correct or remove it"
        )
    known = {word for split in words.values() for word in split.values()}
    classes = sorted(known, key=lambda word: (not word.isdecimal(), int(word) if word.isdecimal() else 0, word))
    if len(classes) < 2:
        raise RefusedError(
            f"--tasks: task {task.name}: column {task.column} has one value only; a task needs at least two classes"
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
    """Return what a checkpoint must match."""
    return [{**asdict(task), "labels": each.identity()} for task, each in zip(tasks, labels, strict=True)]
