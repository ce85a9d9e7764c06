"""Read table files: CSV and TSV with Python's library, Parquet with pyarrow. Every cell is text."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hvfreeze.data.reading import unreadable
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.wording import reason_in_a_line

MOST_BYTES = 2**30
PARQUET = ".parquet"


@dataclass(frozen=True, kw_only=True)
class Table:
    """The columns of a table, as text."""

    path: Path
    names: tuple[str, ...]
    """Column names as written."""
    column: Callable[[str], list[str]]
    """Returns the stripped cells of a column; a missing cell is empty."""
    lines: Sequence[int]
    """The last line of each row, or its number from 1."""
    unit: str = "line"
    """Unit of `lines`: line or row."""

    def place(self, row: int, column: str) -> str:
        """Return the name of a cell in messages."""
        return f"{self.path}, {self.unit} {self.lines[row]}, column {column}"

    def __len__(self) -> int:
        return len(self.lines)


def read_table(path: Path) -> Table:
    """Return the table in a file.

    Raises:
        RefusedError: the file is missing, unreadable or damaged, has no rows, or a row has another number of fields.
        UsageError: the file is Parquet, and pyarrow is not installed.
    """
    if not path.exists():
        raise RefusedError(f"table {path} does not exist; name a CSV, TSV or Parquet file with --data")
    return read_parquet(path) if path.suffix.lower() == PARQUET else read_text(path)


def read_text(path: Path) -> Table:
    """Return the table in a CSV or TSV file. The first line names the columns; empty lines are skipped."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > MOST_BYTES:
        raise RefusedError(f"table {path} is larger than {MOST_BYTES} bytes; use Parquet")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RefusedError(f"table {path}, line {line}: not UTF-8 text ({error.reason}); save it as UTF-8") from error
    first = text.partition("\n")[0]
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ";" if ";" in first and "," not in first else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    rows, lines = list[list[str]](), list[int]()
    try:
        for row in reader:
            if row:
                rows.append([cell.strip() for cell in row])
                lines.append(reader.line_num)
    except csv.Error as error:
        raise RefusedError(f"table {path}, line {reader.line_num}: {error}; correct the line") from error
    if len(rows) < 2:
        raise RefusedError(f"table {path} has no rows; it needs a line of column names and a line per image")
    names = rows[0]
    for row, line in zip(rows[1:], lines[1:]):
        if len(row) != len(names):
            raise RefusedError(
                f"table {path}, line {line}: {len(row)} fields, and the first line names {len(names)} "
                f"columns; correct it or quote fields that contain {delimiter!r}"
            )
    columns = dict(zip(reversed(names), reversed(list(zip(*rows[1:])))))
    return Table(path=path, names=tuple(names), column=lambda name: list(columns[name]), lines=lines[1:])


def read_parquet(path: Path) -> Table:
    """Return the table in a Parquet file; columns are read on demand."""
    parquet = pyarrow_parquet(f"table {path}")
    try:
        file = parquet.ParquetFile(path)
        names, rows = tuple(map(str, file.schema_arrow.names)), file.metadata.num_rows
    except Exception as error:  # a damaged file makes pyarrow raise errors of many kinds
        raise RefusedError(f"table {path} cannot be read as Parquet ({reason_in_a_line(error)}); restore it") from error
    if not rows:
        raise RefusedError(f"table {path} has no rows")

    def column(name: str) -> list[str]:
        try:
            cells = file.read(columns=[name]).column(0).to_pylist()
        except Exception as error:
            raise RefusedError(f"table {path}, column {name}: {reason_in_a_line(error)}; restore the file") from error
        odd = next((row for row, cell in enumerate(cells) if isinstance(cell, (dict, list, bytes))), None)
        if odd is not None:
            hint = "" if isinstance(cells[odd], list) else "; for files with images inside use --data hf:FILE"
            raise RefusedError(f"{path}, row {odd + 1}, column {name} must be text or a number{hint}")
        return [text_of(cell) for cell in cells]

    return Table(path=path, names=names, column=column, lines=range(1, rows + 1), unit="row")


def pyarrow_parquet(what: str) -> Any:
    """Return pyarrow's Parquet module. Raises UsageError, beginning with `what`, if pyarrow is not installed."""
    try:
        return import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(f"{what} is Parquet, which needs pyarrow ({error}): pip install pyarrow") from error


def text_of(cell: Any) -> str:
    """Return a Parquet cell as text. Whole floats become integers: pandas stores integers with gaps as floats."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return str(int(cell))
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell).strip()
