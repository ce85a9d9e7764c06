"""Writes the files of a run on rank 0, line by line, so that little is lost if the run ends early."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hvfreeze.errors import RefusedError
from hvfreeze.files import FileLock, open_own
from hvfreeze.runs.files import publish, reason_of
from hvfreeze.runs.identity import Settings, absolute
from hvfreeze.runs.reading import read_object
from hvfreeze.runs.trackers import Trackers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class NullRecord:
    """The record of every rank except 0: writes nothing."""

    notes: tuple[str, ...] = ()
    resumed: Sequence[dict[str, Any]] = ()
    trackers = Trackers()

    def _do_nothing(self, *_: Any) -> None:
        """Do nothing."""

    change = begin = log = metrics = decision = cut_back = summary = close = _do_nothing

    def position(self) -> dict[str, int]:
        """Return no position."""
        return {}


class Record:
    """Rank 0's files in the run directory; `close` releases `lock`.

    `environment` is the content of environment.json for this job, `changed` the result of `identity.changes`.

    Raises:
        OSError: a file cannot be created there.
    """

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        *,
        environment: Mapping[str, Any],
        changed: Sequence[str] = (),
        lock: FileLock | None = None,
        file: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = directory
        self._settings, self._environment, self._changed, self._lock = settings, environment, list(changed), lock
        self._file = dict(settings if file is None else file)
        self.resumed: list[dict[str, Any]] = []
        unlocked = f"{directory} cannot be locked on this file system; make sure that no other job uses it"
        self.notes = (
            *(f"changed since the run started: {what}" for what in changed),
            *((unlocked,) if lock and not lock.held else ()),
        )
        self.trackers = Trackers()
        """The experiment trackers, which get each line too."""
        self._log = directory / "log.txt"
        self._files = {name: directory / f"{name}.jsonl" for name in ("metrics", "decisions")}
        for path in (self._log, *self._files.values()):
            os.close(open_own(path, os.O_WRONLY))

    def change(self, what: str) -> None:
        """Add a change to the record of this resumption."""
        self._changed.append(what)

    def begin(self) -> None:
        """Write config.yaml and environment.json, before the first step here."""
        known, place = self.directory / "config.yaml", self.directory / "environment.json"
        resumed = read_object(place, ()).get("resumed", []) if place.exists() else []
        if self._changed:
            resumed = [*resumed, {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "changed": self._changed}]
        self.resumed = resumed
        if self._changed or not known.exists():
            given = self._file.pop("given", None)
            settings: dict[str, Any] = absolute(self._file)
            # Leave to go on is given to one job: whoever takes this file for another one has to ask again.
            settings["run"] |= {"resume": False, "resume_inexact": False}
            settings |= {} if given is None else {"given": given}
            publish(known, [yaml.safe_dump(settings, sort_keys=False).encode()])
        environment = {**self._environment, **({"resumed": resumed} if resumed else {})}
        publish(place, [json.dumps(environment, indent=1).encode() + b"\n"])
        # A continued run, such as one with more epochs, has not ended.
        (self.directory / "summary.json").unlink(missing_ok=True)

    def log(self, text: str) -> None:
        """Append a message to log.txt with the time; does nothing if that is not possible."""
        with suppress(OSError), open(open_own(self._log, os.O_WRONLY | os.O_APPEND), "ab") as file:
            # Names of files may be bytes that are no text.
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode("utf-8", "surrogateescape"))

    def metrics(self, line: dict[str, Any]) -> None:
        """Append an epoch's line; NaN and Inf become null."""
        self._append("metrics", finite(line))
        self.trackers.line(line)

    def decision(self, decision: DataclassInstance) -> None:
        """Append a vote's line: the fields of a dataclass of plain values."""
        self._append("decisions", dataclasses.asdict(decision))
        self.trackers.decision(dataclasses.asdict(decision))

    def position(self) -> dict[str, int]:
        """Return the length in bytes of each growing file, for a checkpoint; these bytes are safe on the disk.

        Raises RefusedError if they cannot be written.
        """
        return {name: length_on_disk(path) for name, path in self._files.items()}

    def cut_back(self, position: dict[str, int]) -> None:
        """Remove the lines written after the checkpoint with this `position`; an empty position removes all.

        Raises RefusedError if lines from before the checkpoint are missing.
        """
        for name, path in self._files.items():
            descriptor = open_own(path, os.O_WRONLY)
            try:
                kept, length = position.get(name, 0), os.fstat(descriptor).st_size
                if length < kept:
                    raise RefusedError(
                        f"{path} has {length} bytes, but had {kept} when the checkpoint was written; restore the "
                        "missing lines, or start a new run in another --run-dir"
                    )
                os.ftruncate(descriptor, kept)
            finally:
                os.close(descriptor)

    def summary(self, summary: dict[str, Any]) -> None:
        """Publish summary.json."""
        publish(self.directory / "summary.json", [json.dumps(summary, indent=1).encode() + b"\n"])

    def close(self) -> None:
        """Release the directory for other jobs."""
        self.trackers.close()
        if self._lock is not None:
            self._lock.release()

    def _append(self, name: str, line: dict[str, Any]) -> None:
        path = self._files[name]
        try:
            with open(open_own(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise RefusedError(f"{path} cannot be written: {reason_of(error)}") from error


def length_on_disk(path: Path) -> int:
    """Return a file's length in bytes after flushing it to the disk; raises RefusedError if that fails."""
    try:
        descriptor = open_own(path, os.O_WRONLY)
        try:
            os.fsync(descriptor)
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {reason_of(error)}") from error


def finite(value: Any) -> Any:
    """Return plain values with None (null) in place of NaN and Inf, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
