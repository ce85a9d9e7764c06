"""bench.json, into which single rows are merged, and the printed table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from analysis.benchmarks.judging import Row

HEADER = f"{'':6} {'name':<36} {'ratio':>7} {'bound':>7} {'low':>7} {'high':>7} {'pairs':>6}"


def read_rows(path: Path) -> list[Row]:
    """Return the rows in a file, none where there is no file or it holds something else."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [Row(**{field.name: entry[field.name] for field in fields(Row)}) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows, so that a reader finds all or the ones before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def merged(old: Sequence[Row], new: Sequence[Row], *, order: Sequence[str]) -> list[Row]:
    """Return all rows of both, the new one of each name, in `order`; names that are not in it are dropped."""
    by_name = {row.name: row for row in (*old, *new)}
    return [by_name[name] for name in order if name in by_name]


def line(row: Row) -> str:
    """Return a row of the printed table."""
    numbers = f"{row.ratio:7.3f} {row.bound:7.3f} {row.low:7.3f} {row.high:7.3f} {row.n:6d}"
    return f"{'ok' if row.ok else 'MISSED':6} {row.name:<36} {numbers}"


def table(rows: Sequence[Row]) -> str:
    """Return the printed table; what was missed is explained below it."""
    missed = [f"{row.name}: {row.what}" for row in rows if not row.ok]
    return "\n".join([HEADER, *map(line, rows), *(["", "missed:", *missed] if missed else [])])
