"""Datasets of Hugging Face's library on disk: saved datasets, image folders and Parquet files.

Columns are found by their types: an Image, and a ClassLabel or a column with a usual name. Labels are then read like
those of a table, whose rows have numbers.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hvfreeze.data.folders import held_out_rows
from hvfreeze.data.shards import Ids
from hvfreeze.data.split_names import split_of
from hvfreeze.data.table_files import PARQUET, Table, text_of
from hvfreeze.data.tables import (
    LABEL,
    Chosen,
    Columns,
    Labels,
    Rows,
    column_for,
    label_columns,
    labels_for_model,
    labels_in,
    usual,
    weight_column,
    weights_in,
)
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.imports import import_whole
from hvfreeze.tasks import TASKS
from hvfreeze.user_code import HF
from hvfreeze.wording import reason_in_a_line

BETWEEN = "\x1f"
"""Delimiter of the labels in a cell that holds a list."""


class HubImages:
    """The images of some rows of a dataset as a map-style Dataset, see `data.own`."""

    def __init__(self, data: Any, column: str, rows: Ids) -> None:
        self._images, self._column, self._rows = data.select_columns([column]), column, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> tuple[Image.Image, Any]:
        """Return a PIL image and its label, None if labels are unknown."""
        return self._images[int(self._rows[row])][self._column], None


class HubSplit(HubImages):
    """Rows of a dataset with their labels."""

    flips = True

    def __init__(self, data: Any, column: str, labels: Labels, targets: Any, rows: Ids, weights: Any = None) -> None:
        super().__init__(data, column, rows)
        self.sample_weight = None if weights is None else weights[rows]
        self.classes, self.task = labels.names, labels.kind
        self.targets = targets[rows].tolist()
        self.local_version = version_of(data, column, rows)

    def __getitem__(self, row: int) -> tuple[Image.Image, Any]:
        """Return a PIL image and its label."""
        return super().__getitem__(row)[0], self.targets[row]


def version_of(data: Any, column: str, rows: Ids) -> str:
    """Return a digest that changes if an image of a split does, from times of files on this machine; reads no image.

    The library's fingerprint covers images in memory, or the times of the files that they are read from. If images are
    saved again from equal paths, only the files of the dataset change.
    """
    digest = hashlib.sha256(f"{getattr(data, '_fingerprint', '')} {column} ".encode() + rows.tobytes())
    for path in (Path(each["filename"]) for each in data.cache_files):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def path_of(name: str) -> Path:
    """Return the path in hf:PATH."""
    return Path(name.removeprefix(HF))


def load(name: str) -> dict[str, Any]:
    """Return the splits of a dataset by name; the first call may copy it into the library's cache.

    Raises:
        UsageError: the library is not installed.
        RefusedError: there is no such file or folder, or it is not a dataset.
    """
    path = path_of(name)
    try:
        library: Any = import_whole("datasets")
    except ImportError as error:
        raise UsageError(f"--data ({name}) needs datasets ({error}): pip install datasets") from error
    if not path.exists():
        raise RefusedError(
            f"--data ({name}): {path} does not exist; name a local file or folder; hf download "
            f"--repo-type dataset NAME --local-dir DIR downloads a repository"
        )
    library.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            found = library.load_from_disk(str(path))
        elif path.suffix.lower() == PARQUET:
            found = library.load_dataset("parquet", data_files=str(path))
        else:
            found = library.load_dataset(str(path.absolute()))
    except Exception as error:  # the library raises errors of many kinds on damaged data
        raise RefusedError(
            f"--data ({name}) cannot be read as a dataset: {reason_in_a_line(error)}; restore it"
        ) from error
    return dict(found) if isinstance(found, Mapping) else {"train": found}


def open_hub(name: str, columns: Columns) -> tuple[dict[str, HubSplit], list[str]]:
    """Return the splits `train` and `test`, and notes.

    Raises:
        UsageError: a named column is missing, or no column is known for the images or the labels.
        RefusedError: as for `load`, or a label is missing; names split, row and column.
    """
    found, notes = load(name), list[str]()
    splits = splits_of(found)
    if "train" not in splits:
        raise RefusedError(f"--data ({name}) has no training split, only {', '.join(found)}; name one train")
    tested = next((split for split in ("test", "val") if split in splits), None)
    train = rows_of(name, splits["train"], found[splits["train"]], columns)
    labels = labels_of(train, found[splits["train"]], columns)
    weighted = weight_column(train.table, train.chosen, columns)
    weights = None if weighted is None else weights_in(train, weighted)
    notes.append(f"{name}: {train.chosen.in_words(weighted)}")
    sets: dict[str, HubSplit] = {}
    if tested is None:
        given = labels.of(train)
        task = TASKS[labels.kind](len(labels.names))
        kept, held, note = held_out_rows(task, torch.from_numpy(given), f"{name} has no test split")
        for part, rows in (("train", kept), ("test", held)):
            sets[part] = HubSplit(found[splits["train"]], train.chosen.image, labels, given, rows, weights)
        return sets, [*notes, note]
    if tested == "val":
        notes.append(f"the split {splits['val']} serves as the test set")
    for part, called in (("train", splits["train"]), ("test", splits[tested])):
        data = found[called]
        own = train if part == "train" else rows_of(name, called, data, columns)
        each = weights if part == "train" else None
        sets[part] = HubSplit(data, own.chosen.image, labels, labels.of(own), np.arange(len(data)), each)
    return sets, notes


def open_test(name: str, columns: Columns, kind: str, names: tuple[str, ...]) -> HubSplit:
    """Return the test split, or the only one, with labels of the task `kind` that a model with outputs `names` has."""
    found = load(name)
    part = tested_part(found)
    rows = rows_of(name, part, found[part], columns)
    if any(BETWEEN in cell for cells in rows.cells for cell in cells):
        columns = replace(columns, delimiter=BETWEEN)
    labels = labels_for_model(rows, columns, kind, names)
    return HubSplit(found[part], rows.chosen.image, labels, labels.of(rows), np.arange(len(found[part])))


def open_images(name: str, columns: Columns) -> HubImages:
    """Return the images of the test split, or of the only one."""
    found = load(name)
    part = tested_part(found)
    data = found[part]
    return HubImages(data, image_column(table_of(name, part, data), data, columns), np.arange(len(data)))


def tested_part(found: Mapping[str, Any]) -> str:
    """Return the name of the test split, else of the validation split, else of the first one."""
    splits = splits_of(found)
    return next((splits[split] for split in ("test", "val") if split in splits), next(iter(found)))


def table_of(name: str, split: str, data: Any) -> Table:
    """Return a split as a table."""
    return Table(
        path=Path(f"{name} {split}"),
        names=tuple(data.features),
        column=lambda key: cells_of(data, key),
        lines=range(1, len(data) + 1),
        unit="row",
    )


def image_column(table: Table, data: Any, columns: Columns) -> str:
    """Return the column with images. Raises UsageError if none is known, or the named one has none."""
    typed = [key for key, feature in data.features.items() if type(feature).__name__ == "Image"]
    column = column_for(table, "image", columns.image, typed)
    if column not in typed:
        raise UsageError(f"--image-column ({column}) of {table.path} holds {data.features[column]}, not images")
    return column


def splits_of(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the splits train, val and test."""
    named = {called: split_of(called) for called in found}
    return {split[0]: called for called, split in named.items() if split is not None and not split[1]}


def rows_of(name: str, split: str, data: Any, columns: Columns) -> Rows:
    """Return the labels of a split as table cells."""
    table = table_of(name, split, data)
    image = image_column(table, data, columns)
    typed = [key for key, feature in data.features.items() if class_names(feature) is not None]
    labels = label_columns(table, columns, typed if len(typed) == 1 else usual(table, LABEL))
    cells = list(zip(*map(table.column, labels)))
    return Rows(table, Chosen(image, labels, None), list(range(len(data))), [""] * len(data), cells)


def labels_of(rows: Rows, data: Any, columns: Columns) -> Labels:
    """Return the label format: the names of a ClassLabel in their order, else as for a table."""
    feature = data.features[rows.chosen.labels[0]]
    inner = getattr(feature, "feature", None)
    if len(rows.chosen.labels) == 1 and columns.task in ("auto", "classes") and hasattr(feature, "names"):
        return Labels("classes", tuple(feature.names))
    if inner is not None or isinstance(feature, list):
        if columns.task in ("classes", "numbers"):
            raise UsageError(
                f"--task ({columns.task}): column {rows.chosen.labels[0]} has a list per image, which --task labels "
                f"reads; for {columns.task}, use a column with one value per image"
            )
        names = getattr(inner, "names", None)
        if names is not None:
            return Labels("labels", tuple(names), BETWEEN)
        if "float" in str(inner):
            raise UsageError(
                f"--label-column ({rows.chosen.labels[0]}): lists of fractions are not supported; use "
                f"one column per number"
            )
        columns = Columns(delimiter=BETWEEN)
    return labels_in(rows, columns)


def cells_of(data: Any, key: str) -> list[str]:
    """Return a column as text: names of classes, and all entries of lists."""
    names = class_names(data.features[key])

    def text(value: Any) -> str:
        if names is not None and isinstance(value, int):
            # Datasets without labels have -1.
            return names[value] if 0 <= value < len(names) else ""
        return text_of(value)

    values: Sequence[Any] = data.with_format(None)[key][:]
    return [BETWEEN.join(map(text, value)) if isinstance(value, (list, tuple)) else text(value) for value in values]


def class_names(feature: Any) -> Sequence[str] | None:
    """Return the names of the classes of a column with classes or lists of classes; None for another column."""
    names: Sequence[str] | None = getattr(feature, "names", None) or getattr(
        getattr(feature, "feature", None), "names", None
    )
    return names
