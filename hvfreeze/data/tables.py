"""Labels from a table: find its columns, and turn its rows into a training and a test set.

image,label,split
owls/1.jpg,owl,train
"""

from __future__ import annotations

import csv
import errno
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hvfreeze.config.data import DataConfig
from hvfreeze.data.folders import Folders, Listing, folders_of, hold_out, looks_of, meant_by
from hvfreeze.data.split_names import split_of
from hvfreeze.data.table_files import Table, read_table
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.row_weights import find_odd_weight
from hvfreeze.wording import first_few, plural

IMAGE = (
    "image",
    "image path",
    "image file",
    "image name",
    "path",
    "file",
    "file path",
    "filepath",
    "file name",
    "filename",
)
LABEL = ("label", "labels", "class", "class name", "class id", "category", "target", "y")
SPLIT = ("split", "subset", "set", "partition")
WEIGHT = ("sample weight",)
"""Usual names of the columns, in lower case and with spaces."""
INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+")
"""Names that pandas gives to the column of its index."""
NONE = "none"
"""Value of --split-column and --weight-column for a table without one."""
MISSING = ("", "nan")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
WHOLE = re.compile(r"(?:\+(?=\d))?(-?\d+)(?:\.0*)?")
"""A whole number. Its group has no + and no trailing .0."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a table as given by the user; None is found by the usual names."""

    image: str | None = None
    label: str | None = None
    """One column, or several separated by commas."""
    split: str | None = None
    weight: str | None = None
    delimiter: str | None = None
    """Delimiter of the labels in a cell."""
    test: str | None = None
    """Path of another table with the test samples."""
    task: str = "auto"
    """A key of `tasks.TASKS`, or auto."""


USUAL_COLUMNS = Columns()


def columns_of(data: DataConfig) -> Columns:
    """Return the table columns of a run's settings."""
    return Columns(
        image=data.image_column,
        label=data.label_column,
        split=data.split_column,
        weight=data.weight_column,
        delimiter=data.label_delimiter,
        test=data.test_table,
        task=data.task,
    )


class Chosen(NamedTuple):
    """The chosen columns of a table."""

    image: str
    labels: tuple[str, ...]
    split: str | None

    def in_words(self, weighted: str | None) -> str:
        """Return the columns for a log line; `weighted` has the sample weights."""
        split = f", splits from {self.split}" if self.split else ""
        weights = f", weights from {weighted}" if weighted else ""
        return f"images from column {self.image}, labels from {first_few(self.labels)}{split}{weights}"


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one split."""

    table: Table
    chosen: Chosen
    numbers: list[int]
    """Indices of the rows in the table."""
    paths: list[str]
    """Paths of the rows' images."""
    cells: list[tuple[str, ...]]
    """The rows' cells in the label columns."""

    def place(self, row: int, column: int = 0) -> str:
        """Return the name of a label's cell in messages."""
        return self.table.place(self.numbers[row], self.chosen.labels[column])


@dataclass(frozen=True, eq=False)
class Labels:
    """The format of the label cells."""

    kind: str
    """The task, a key of `tasks.TASKS`."""
    names: tuple[str, ...]
    """Names of the classes, labels or numbers."""
    delimiter: str | None = None
    known_to: str = "training rows"
    """The origin of these names, for messages."""

    def of(self, rows: Rows) -> NDArray[np.generic]:
        """Return the labels of rows in the form of `ImageSet.labels`.

        Raises:
            RefusedError: a cell is empty or invalid (names its place), or two of `names` are equal as classes.
        """
        named = self.kind == "classes" or self.delimiter is not None
        number = self.number_by_name(rows) if named else {}
        if self.kind == "classes":
            found = []
            for row, (cell,) in enumerate(rows.cells):
                name = class_of(cell)
                refuse_missing(rows, row, 0, cell)
                if name not in number:
                    raise RefusedError(f"{rows.place(row)}: {self.unknown(name)}")
                found.append(number[name])
            return np.array(found, np.int64)
        # Numbers are standardised before they are rounded: the times of a day may be seconds since 1970.
        kind = np.float64 if self.kind == "numbers" else np.float32
        values = np.zeros((len(rows.cells), len(self.names)), kind)
        for row, cells in enumerate(rows.cells):
            if self.delimiter is not None:
                for name in parts_of(cells[0], self.delimiter):
                    if name not in number:
                        raise RefusedError(f"{rows.place(row)}: {self.unknown(name)}")
                    values[row, number[name]] = 1
                continue
            for column, cell in enumerate(cells):
                refuse_missing(rows, row, column, cell)
                values[row, column] = self.number_in(cell, rows.place(row, column))
        return values

    def number_by_name(self, rows: Rows) -> dict[str, int]:
        """Return the index of each name, whose key is its `class_of`. Raises RefusedError if two keys are equal."""
        number = dict[str, int]()
        for place, name in enumerate(self.names):
            first = self.names[number.setdefault(class_of(name), place)]
            if first != name:
                raise RefusedError(
                    f"{rows.table.path}: the names {first!a} and {name!a} are the same class: the form of accents, a + "
                    "and a trailing .0 do not count; rename one"
                )
        return number

    def unknown(self, name: str) -> str:
        """Return the refusal of a name that is not among `names`."""
        alike = [each for each in self.names if looks_of(each) == looks_of(name)]
        hint = f"write {alike[0]!r}" if alike else "add training rows with it or remove the row"
        what = "class" if self.kind == "classes" else "label"
        return f"{what} {name!r} is unknown to the {self.known_to}; {hint}"

    def number_in(self, cell: str, place: str) -> float:
        """Return the number in a cell, 0 or 1 for several labels."""
        value = float(cell) if NUMBER.fullmatch(cell) else {"true": 1.0, "false": 0.0}.get(cell.lower(), math.nan)
        if not abs(value) <= torch.finfo(torch.float32).max:
            raise RefusedError(f"{place}: {cell!r} must be a {'number' if self.kind == 'numbers' else 'label, 0 or 1'}")
        if self.kind == "labels" and value not in (0, 1):
            raise RefusedError(f"{place}: {cell!r} must be 0 or 1; use --task numbers if labels are numbers")
        return value


def list_table(path: Path, root: Path, columns: Columns) -> Folders:
    """List the images and labels of a table, whose paths are relative to `root`, with one system call per file.

    Raises:
        RefusedError: the table, a cell or an image is missing or invalid; names file, line and column.
        UsageError: a named column is missing, or no column is known for the images or the labels.
    """
    table = read_table(path)
    chosen, split_rows = choose_columns(table, columns), dict[str, Rows]()
    weighted = weight_column(table, chosen, columns)
    notes = [f"{path.name}: {chosen.in_words(weighted)}"]
    if columns.test is not None:
        if chosen.split is not None:
            notes.append(f"column {chosen.split} is ignored: the test samples are in --test-table")
        other = read_table(Path(columns.test))
        known = replace(columns, split=NONE)
        split_rows = {"train": rows_in(table, chosen), "test": rows_in(other, choose_columns(other, known))}
        if split_rows["test"].chosen.labels != chosen.labels:
            raise RefusedError(
                f"table {other.path} has labels in {first_few(split_rows['test'].chosen.labels)}, and {path} in "
                f"{first_few(chosen.labels)}; name the columns with --label-column"
            )
    elif chosen.split is not None:
        split_rows, told = by_split(table, chosen)
        notes += told
    training = split_rows.get("train") or rows_in(table, chosen)
    labels = labels_in(training, columns)
    listings = {
        name: listing_of(rows, root, labels, weighted if rows is training else None)
        for name, rows in (split_rows or {"": training}).items()
    }
    if not split_rows:
        whole = listings[""]
        listings, told = hold_out(whole, f"{path} has no column for the split")
        notes += told
    notes += [note for name in ("train", "test") for note in listings[name].notes]
    if labels.kind == "classes":
        tested = set(listings["test"].labels().tolist())
        absent = [name for number, name in enumerate(labels.names) if number not in tested]
        notes += [f"no test row has class {first_few(absent)}: accuracy does not cover it"] if absent else []
    return folders_of(root, listings, notes)


def list_for_evaluation(path: Path, columns: Columns) -> Rows:
    """Return the test rows of a table, or all rows without a split column; image paths are relative to the table."""
    table = read_table(path)
    chosen = choose_columns(table, columns)
    if chosen.split is None:
        return rows_in(table, chosen)
    return by_split(table, chosen, trains=False)[0]["test"]


def images_in(path: Path, columns: Columns) -> list[Path]:
    """Return the images of a table in its order; labels are optional."""
    table = read_table(path)
    return [path.parent / cell for cell in table.column(column_for(table, "image", columns.image, usual(table, IMAGE)))]


def choose_columns(table: Table, columns: Columns) -> Chosen:
    """Return the chosen columns: the named ones, else those with usual names."""
    image = column_for(table, "image", columns.image, usual(table, IMAGE))
    split = None
    if columns.split is None:
        found = usual(table, SPLIT)
        if found:
            # Beside a table of test samples, the column has no effect.
            split = found[0] if columns.test else column_for(table, "split", None, found)
    elif columns.split != NONE:
        split = column_for(table, "split", columns.split, [])
    known = usual(table, LABEL)
    if columns.label is None and not known and columns.task in ("labels", "numbers"):
        return Chosen(image, all_others(table, columns, (image, split)), split)
    return Chosen(image, label_columns(table, columns, known), split)


def all_others(table: Table, columns: Columns, chosen: Sequence[str | None]) -> tuple[str, ...]:
    """Return the label columns of a table without names for them: all but those of images, splits and weights.

    The index that pandas writes as a column is none of them.
    """
    others = {*chosen, columns.weight, *usual(table, WEIGHT)}
    labels = tuple(name for name in table.names if name not in others and name.strip() and not INDEX.fullmatch(name))
    for name in labels:
        check_column(table, "label", name)
    return labels or (column_for(table, "label", None, []),)


def label_columns(table: Table, columns: Columns, known: Sequence[str]) -> tuple[str, ...]:
    """Return the named label columns, else the only one of `known`."""
    if columns.label is None:
        return (column_for(table, "label", None, known),)
    labels = tuple(next(csv.reader([columns.label], skipinitialspace=True)))
    for name in labels:
        check_column(table, "label", name)
    if len(set(labels)) < len(labels):
        raise UsageError(f"--label-column ({columns.label}) must name different columns")
    return labels


def column_for(table: Table, what: str, named: str | None, known: Sequence[str]) -> str:
    """Return the named column, else the only one of `known`."""
    if named is None and len(known) != 1:
        why = f"several columns for the {what}: {', '.join(known)}" if known else f"no column named {what}"
        raise UsageError(
            f"{table.path} has {why}; name the column with --{what}-column (columns: {first_few(table.names)})"
        )
    column = known[0] if named is None else named
    check_column(table, what, column)
    return column


def weight_column(table: Table, chosen: Chosen, columns: Columns) -> str | None:
    """Return the column with sample weights: the named one, else `sample_weight`; None if there is none.

    A column `weight` may have kilograms.
    """
    if columns.weight == NONE:
        return None
    others, known = (chosen.image, chosen.split, *chosen.labels), usual(table, WEIGHT)
    if columns.weight is None and not any(name not in others for name in known):
        return None
    return column_for(table, "weight", columns.weight, known)


def weights_in(rows: Rows, column: str) -> NDArray[np.float64]:
    """Return the sample weights of rows, (N,).

    Raises:
        RefusedError: a cell is no number of at least 0, or all are 0.
    """
    cells, way_out = rows.table.column(column), f"correct it, or use --weight-column {NONE} for equal weights"
    found = [cells[row] for row in rows.numbers]
    weights = np.array([float(cell) if NUMBER.fullmatch(cell) else math.nan for cell in found])
    odd = find_odd_weight(weights)
    if odd is not None:
        place = rows.table.place(rows.numbers[odd], column)
        raise RefusedError(f"{place}: {found[odd]!r} must be a weight, a number of at least 0; {way_out}")
    if not weights.any():
        raise RefusedError(f"table {rows.table.path}, column {column}: all weights of training rows are 0; {way_out}")
    return weights


def check_column(table: Table, what: str, name: str) -> None:
    """Raise UsageError if a table has no such column, or several."""
    count = table.names.count(name)
    if count != 1:
        why = "is not a column" if count == 0 else f"is the name of {count} columns"
        raise UsageError(f"--{what}-column ({name}) {why} of {table.path}, which has {first_few(table.names)}")


def usual(table: Table, names: Sequence[str]) -> list[str]:
    """Return the columns with one of the usual names."""
    return [name for name in dict.fromkeys(table.names) if re.sub(r"[\s_-]+", " ", name.strip()).lower() in names]


def rows_in(table: Table, chosen: Chosen, numbers: Sequence[int] | None = None) -> Rows:
    """Return the rows `numbers` of a table; None returns all.

    Raises:
        RefusedError: the path of an image is empty.
    """
    own = list(range(len(table)) if numbers is None else numbers)
    images = table.column(chosen.image)
    cells = list(zip(*(table.column(name) for name in chosen.labels)))
    for row in own:
        if images[row].lower() in MISSING:
            raise RefusedError(f"{table.place(row, chosen.image)}: no image; fill it in or remove the row")
    return Rows(table, chosen, own, [os.path.normpath(images[row]) for row in own], [cells[row] for row in own])


def by_split(table: Table, chosen: Chosen, *, trains: bool = True) -> tuple[dict[str, Rows], list[str]]:
    """Return the rows of the training and the test set, and notes; only with `trains` must there be training rows.

    Raises:
        RefusedError: a cell is not a split, or a split has no rows.
    """
    assert chosen.split is not None
    numbers: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    known: dict[str, str | None] = {}
    for row, cell in enumerate(table.column(chosen.split)):
        if cell not in known:
            found = split_of(cell)
            known[cell] = found[0] if found is not None and not found[1] else None
        split = known[cell]
        if split is None:
            raise RefusedError(
                f"{table.place(row, chosen.split)}: {cell!r} must be train, val or test; use "
                f"--split-column {NONE} to ignore the column"
            )
        numbers[split].append(row)
    tested = "test" if numbers["test"] else "val"
    lacking = "training" if trains and not numbers["train"] else "test" if not numbers[tested] else ""
    if lacking:
        raise RefusedError(
            f"table {table.path}, column {chosen.split}: no {lacking} rows; use --split-column {NONE} "
            f"to ignore the column"
        )
    notes = []
    if numbers["val"]:
        count = len(numbers["val"])
        serve = f"{plural(count, 'val row serves', 'val rows serve')} as the test set"
        unused = f"{plural(count, 'val row is', 'val rows are')} not used: accuracy is measured on test"
        notes.append(serve if tested == "val" else unused)
    parts = {"train": numbers["train"], "test": numbers[tested]}
    return {name: rows_in(table, chosen, own) for name, own in parts.items()}, notes


def labels_in(rows: Rows, columns: Columns) -> Labels:
    """Return the label format of the training rows: that of --task, else inferred from the cells.

    Raises:
        RefusedError: a cell is empty, or there are fewer than two classes.
    """
    chosen, task = rows.chosen.labels, columns.task
    delimiter = columns.delimiter or ("," if task == "labels" and len(chosen) == 1 else None)
    if delimiter is not None:
        if len(chosen) > 1 or task in ("classes", "numbers"):
            raise UsageError(f"--label-delimiter ({delimiter}) needs one --label-column and --task labels")
        names = sorted({name for (cell,) in rows.cells for name in parts_of(cell, delimiter)}, key=order_of)
        if not names:
            raise RefusedError(f"table {rows.table.path}, column {chosen[0]}: no training row has a label")
        return Labels("labels", tuple(names), delimiter)
    for row, cells in enumerate(rows.cells):
        for column, cell in enumerate(cells):
            refuse_missing(rows, row, column, cell)
    flat = {cell for cells in rows.cells for cell in cells}
    kind = task
    if task == "auto":
        numeric = all(map(NUMBER.fullmatch, flat))
        if len(chosen) > 1:
            kind = "labels" if {class_of(cell).lower() for cell in flat} <= {"0", "1", "true", "false"} else "numbers"
        else:
            kind = "numbers" if numeric and not all(map(WHOLE.fullmatch, flat)) else "classes"
    if kind != "classes":
        return Labels(kind, chosen)
    if len(chosen) > 1:
        raise UsageError(f"--label-column ({columns.label}) must name one column with --task classes")
    classes = sorted(set(map(class_of, flat)), key=order_of)
    if len(classes) < 2:
        raise RefusedError(
            f"table {rows.table.path}, column {chosen[0]}: one class only ({classes[0]}); training needs at least two"
        )
    return Labels(kind, tuple(classes))


def labels_for_model(rows: Rows, columns: Columns, kind: str, names: tuple[str, ...]) -> Labels:
    """Return the label format of rows for a model with outputs `names`.

    Raises:
        RefusedError: the columns are not the model's labels or numbers.
    """
    chosen = rows.chosen.labels
    if kind == "classes" or chosen == names:
        return Labels(kind, names, known_to="model")
    if kind == "labels" and len(chosen) == 1:
        return Labels(kind, names, columns.delimiter or ",", known_to="model")
    raise RefusedError(
        f"table {rows.table.path} has labels in {first_few(chosen)}, and the model predicts "
        f"{first_few(names)}; name the columns of its training run with --label-column"
    )


def class_of(cell: str) -> str:
    """Return the name of a class; whole numbers lose a + and a trailing .0."""
    whole = WHOLE.fullmatch(cell)
    return whole[1] if whole else meant_by(cell)


def order_of(name: str) -> tuple[int, int, bytes]:
    """Return a sort key: whole numbers by value, then other names by their bytes."""
    whole = name.isascii() and name.removeprefix("-").isdigit()
    return (0, int(name), os.fsencode(name)) if whole else (1, 0, os.fsencode(name))


def parts_of(cell: str, delimiter: str) -> list[str]:
    """Return the labels in a cell."""
    parts = (part.strip() for part in cell.split(delimiter))
    return [class_of(part) for part in parts if part.lower() not in MISSING]


def refuse_missing(rows: Rows, row: int, column: int, cell: str) -> None:
    """Raise RefusedError for a cell without a label."""
    if cell.lower() in MISSING:
        said = f"{cell!r} is not a label" if cell else "no label"
        raise RefusedError(f"{rows.place(row, column)}: {said}; fill it in or remove the row")


def listing_of(rows: Rows, root: Path, labels: Labels, weighted: str | None) -> Listing:
    """Return the images of rows, sorted by their paths as bytes, in the order of the sample ids.

    `weighted` is the column with sample weights.

    Raises:
        RefusedError: files do not exist, an image has two classes, or a weight is invalid.
    """
    given = labels.of(rows)
    weights = None if weighted is None else weights_in(rows, weighted)
    sizes, times = files_at(rows, root)
    order = sorted(range(len(rows.paths)), key=lambda row: os.fsencode(rows.paths[row]))
    notes, repeated = list[str](), Counter(rows.paths)
    again = sum(count - 1 for count in repeated.values())
    if again:
        first: dict[str, int] = {}
        for row, path in enumerate(rows.paths):
            before = first.setdefault(path, row)
            if labels.kind == "classes" and given[before] != given[row]:
                line = rows.table.lines[rows.numbers[before]]
                raise RefusedError(
                    f"{rows.place(row)}: {path} is {rows.cells[row][0]!r} here and {rows.cells[before][0]!r} on "
                    f"{rows.table.unit} {line}; keep one row; for several labels per image use --label-delimiter"
                )
        example = next(path for path, count in repeated.items() if count > 1)
        repeat = plural(again, "row repeats", "rows repeat")
        notes.append(f"{rows.table.path.name}: {repeat} an image, such as {example}; all rows count")
    return Listing(
        root=root,
        classes=labels.names,
        paths=tuple(rows.paths[row] for row in order),
        num_bytes=sizes[order],
        times=times[order],
        notes=tuple(notes),
        given=given[order],
        weights=None if weights is None else weights[order],
        kind=labels.kind,
    )


def files_at(rows: Rows, root: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the size and the modification time of each image. Raises RefusedError if a file is not accessible."""
    known: dict[str, tuple[int, int]] = {}
    refused = list[str]()
    for row, path in enumerate(rows.paths):
        if path not in known:
            try:
                status = os.stat(root / path)
                known[path] = status.st_size, status.st_mtime_ns
            except (OSError, ValueError) as error:
                known[path] = 0, 0
                missing = getattr(error, "errno", None) in (errno.ENOENT, errno.ENOTDIR)
                why = "does not exist" if missing else f"cannot be read ({getattr(error, 'strerror', None) or error})"
                refused.append(f"{rows.table.place(rows.numbers[row], rows.chosen.image)}: {root / path} {why}")
    if refused:
        raise RefusedError(
            f"{first_few(refused, between='; ')}; paths are relative to --data-dir, by default the folder of the table"
        )
    found = np.array([known[path] for path in rows.paths], np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]
