"""What rank 0 writes of a run, line by line, so that nothing is lost when the run is."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvfreeze.errors import RefusedError
from hvfreeze.runs.publishing import open_own, publish, reason_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class NullRecord:
    """What every rank but 0 keeps of a run: nothing."""

    def metrics(self, line: dict[str, Any]) -> None:
        """Keep nothing."""

    def decision(self, decision: DataclassInstance) -> None:
        """Keep nothing."""

    def position(self) -> dict[str, int]:
        """Return no position."""
        return {}

    def cut_back(self, position: dict[str, int]) -> None:
        """Cut nothing."""

    def summary(self, summary: dict[str, Any]) -> None:
        """Keep nothing."""


class Record:
    """Rank 0's files in the run directory.

    Raises:
        OSError: a file cannot be made there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = {name: directory / f"{name}.jsonl" for name in ("metrics", "decisions")}
        for path in self._files.values():
            os.close(open_own(path, os.O_WRONLY))

    def metrics(self, line: dict[str, Any]) -> None:
        """Append an epoch's line."""
        self._append("metrics", line)

    def decision(self, decision: DataclassInstance) -> None:
        """Append a vote's line: the fields of a dataclass of plain values."""
        self._append("decisions", dataclasses.asdict(decision))

    def position(self) -> dict[str, int]:
        """Return the length in bytes of each file that grows, to be kept in a checkpoint."""
        return {name: path.stat().st_size for name, path in self._files.items()}

    def cut_back(self, position: dict[str, int]) -> None:
        """Drop the lines that were written after the checkpoint with this `position`; an empty one drops all.

        Raises:
            RefusedError: lines that were written before the checkpoint are missing.
        """
        for name, path in self._files.items():
            descriptor = open_own(path, os.O_WRONLY)
            try:
                kept, length = position.get(name, 0), os.fstat(descriptor).st_size
                if length < kept:
                    raise RefusedError(
                        f"{path} has {length} bytes, but had {kept} when the checkpoint was written; put the "
                        "missing lines back, or start anew in another --run-dir"
                    )
                os.ftruncate(descriptor, kept)
            finally:
                os.close(descriptor)

    def summary(self, summary: dict[str, Any]) -> None:
        """Publish summary.json."""
        publish(self.directory / "summary.json", [json.dumps(summary, indent=1).encode() + b"\n"])

    def _append(self, name: str, line: dict[str, Any]) -> None:
        path = self._files[name]
        try:
            with open(open_own(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise RefusedError(f"{path} cannot be written: {reason_of(error)}") from error
