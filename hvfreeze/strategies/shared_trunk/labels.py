"""The labels of the tasks: the data set's own, or a table's columns."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvfreeze.data.batches import Batch
from hvfreeze.data.dealing import Corpus
from hvfreeze.data.sets.image_set import ImageSet
from hvfreeze.data.sources import FileSource
from hvfreeze.errors import RefusedError
from hvfreeze.strategies.shared_trunk.tasks import Task


@dataclass(frozen=True, eq=False)
class Labels:
    """A task's classes, and the class of every sample that the run uses."""

    classes: tuple[str, ...]
    train: Tensor = field(repr=False)
    """(N,) int64 by sample id; -1 where the run does not use the sample."""
    test: Tensor = field(repr=False)

    def weights(self, loss: str) -> Tensor | None:
        """Return what a sample of each class counts in `loss`, (classes,): None is 1.

        `balanced`: all classes count the same in sum, N / (classes x samples of the class).
        """
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
        RefusedError: a sample of the run has no label, or the table names none that there is.
    """
    own = Labels(corpus.train.classes, corpus.train.labels, corpus.evaluated.labels)
    if not table:
        return [own] * len(tasks)
    reader = csv.DictReader(io.StringIO(table))
    columns = set(reader.fieldnames or ())
    for column in ("sample", *(task.column for task in tasks)):
        if column not in columns:
            raise RefusedError(
                f"--tasks: the table of labels has no column {column}; it has {', '.join(sorted(columns))}"
            )
    sets = {"train": corpus.train, "test": corpus.evaluated}
    rows_of = {split: rows_by_name(image_set) for split, image_set in sets.items()}
    cells: dict[str, dict[int, dict[str, str]]] = {"train": {}, "test": {}}
    for number, line in enumerate(reader, 2):
        split = "train" if corpus.evaluated is corpus.train and "split" not in columns else line.get("split") or "train"
        row = rows_of.get(split, {}).get(line["sample"])
        if row is None:
            raise RefusedError(f"--tasks: line {number} of the table: there is no sample {line['sample']} in {split}")
        cells[split][row] = line
    if corpus.evaluated is corpus.train:
        cells["test"] = cells["train"]
    used = {"train": np.concatenate(corpus.plan.shards), "test": corpus.evaluated_ids}
    return [column_of(task, cells, used, sets) for task in tasks]


def rows_by_name(image_set: ImageSet) -> dict[str, int]:
    """Return each sample's row by what a table may call it: its number, and for an image file its path."""
    rows = {str(row): row for row in range(len(image_set))}
    if isinstance(image_set.source, FileSource):
        rows |= {path: row for row, path in enumerate(image_set.source.paths)}
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
        words[split] = {row: (cells[split].get(row, {}).get(task.column) or "").strip() for row in ids.tolist()}
        for row, word in words[split].items():
            if not word:
                raise RefusedError(f"--tasks: task {task.name}: sample {row} of {split} has no label in {task.column}")
    known = {word for split in words.values() for word in split.values()}
    classes = sorted(known, key=lambda word: (not word.isdigit(), int(word) if word.isdigit() else 0, word))
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
