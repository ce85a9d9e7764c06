"""Checkpoints: one file each, published atomically, verified by a digest, loaded without running code.

A file is a line of JSON (`step`, `size`, `sections`), then as many sections as `sections` has lengths, then the SHA-256
of all that as 64 hexadecimal digits. The first section is the state shared by all ranks, the others are the ranks' own
in rank order; each is a `torch.save` archive of plain values and tensors. Rank 0 reads and writes one rank's section at
a time, so only rank 0 needs the directory, and memory for one section.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import queue
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvfreeze.errors import HvfreezeError, RefusedError
from hvfreeze.plain_load import load_plain
from hvfreeze.runs.files import publishing

KEPT = 2
LONGEST_HEADER = 2**20


def path_of(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return directory / f"step-{step:08d}.pt"


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the checkpoints in a folder in the order of their steps, which may exceed the padding of names."""
    found = {path.stem.removeprefix("step-"): path for path in directory.glob("step-*.pt")}
    return [found[step] for step in sorted(filter(str.isdecimal, found), key=int)]


def newest(directory: Path) -> Path | None:
    """Return the checkpoint with the most steps, None without one."""
    return next(reversed(checkpoints_in(directory)), None)


def packed(state: dict[str, Any]) -> Tensor:
    """Return plain values and tensors as the bytes of a `torch.save` archive, uint8 [length]: a copy."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpacked(data: Tensor, *, name: str) -> dict[str, Any]:
    """Undo `packed`."""
    try:
        state = load_plain(io.BytesIO(data.numpy().tobytes()))
    except RefusedError:
        raise
    except Exception as error:  # a damaged archive can make the unpickler raise any exception
        raise RefusedError(f"checkpoint {name} contains more than plain values and is refused") from error
    if not isinstance(state, dict):
        raise RefusedError(f"checkpoint {name} does not contain the state of a run and is refused")
    return state


class Saving:
    """Writes a checkpoint in a separate thread; older ones stay complete if the process crashes.

    Call `put` with each section in turn, which waits while two sections are pending, and `finish` after the last.
    `result` raises any error. When the file is safe on the disk, older ones are removed: all but the last, or all with
    `alone`, as when they count steps differently.
    """

    def __init__(self, directory: Path, *, step: int, size: int, lengths: Sequence[int], alone: bool = False) -> None:
        header = {"step": step, "size": size, "sections": list(lengths)}
        self.path, self._alone = path_of(directory, step), alone
        self._failure: HvfreezeError | None = None
        self._finished = self._broken = False
        self._parts: queue.Queue[memoryview | None] = queue.Queue(maxsize=2)
        # Daemon: an interrupt here loses this object, and a waiting thread would then keep the process alive.
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()
        self._parts.put(memoryview(json.dumps(header).encode() + b"\n"))

    def put(self, section: Tensor) -> None:
        """Queue a section, uint8 [length], which must not change any more."""
        self._parts.put(memoryview(section.numpy()))

    def finish(self) -> None:
        """Mark the last section as queued; returns at once."""
        self._finished = True
        self._parts.put(None)

    def result(self) -> None:
        """Wait until the file is safe on the disk.

        Raises:
            RefusedError: it could not be written, e.g. because the disk is full; older checkpoints are untouched.
        """
        self._thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def release(self) -> None:
        """Wait until writing has stopped; a completely queued checkpoint is kept, an incomplete one is removed."""
        if self._thread.is_alive() and not self._finished:
            self._broken = True
            self._parts.put(None)
        self._thread.join()

    def _write(self) -> None:
        ended = False
        digest = hashlib.sha256()
        try:
            with publishing(self.path) as file:
                for left in self.path.parent.glob(".step-*.tmp"):
                    if left != self.path.with_name(f".{self.path.name}.tmp"):
                        left.unlink()
                for part in iter(self._parts.get, None):
                    file.write(part)
                    digest.update(part)
                ended = True
                if self._broken:
                    raise RefusedError(f"{self.path} was not written completely")
                file.write(digest.hexdigest().encode())
            others = [path for path in checkpoints_in(self.path.parent) if path != self.path]
            for old in others if self._alone else others[: 1 - KEPT]:
                old.unlink()
        except HvfreezeError as error:
            self._failure = error
        except OSError as error:
            self._failure = RefusedError(f"old checkpoints in {self.path.parent} cannot be removed: {error.strerror}")
        # Whoever puts must not wait for a thread that has given up.
        while not ended and self._parts.get() is not None:
            pass


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint file; its sections are read on demand."""

    path: Path
    step: int
    size: int
    """Number of ranks that wrote it."""
    offsets: tuple[int, ...]
    """Offset of each section; the last entry is the end of the last section."""

    def section(self, number: int) -> Tensor:
        """Return a section as uint8 [length]: 0 is the shared state, 1 + r that of rank r."""
        first, last = self.offsets[number : number + 2]
        with open_plain(self.path) as file:
            file.seek(first)
            data = np.fromfile(file, dtype=np.uint8, count=last - first)
        if len(data) != last - first:
            raise damaged(self.path)
        return torch.from_numpy(data)


def open_checkpoint(path: Path, *, size: int | None) -> Checkpoint:
    """Return the checkpoint at `path`, after verifying every byte.

    Raises:
        RefusedError: the file is damaged, has another world size than `size` (if given), or is not a regular file.
    """
    with open_plain(path) as file:
        line = file.readline(LONGEST_HEADER)
        header = header_in(line)
        if header is None:
            raise damaged(path)
        saved_size, step, lengths = header
        digest, left = hashlib.sha256(line), sum(lengths)
        while left and (block := file.read(min(left, 2**24))):
            digest.update(block)
            left -= len(block)
        expected = digest.hexdigest().encode()
        if left or file.read(len(expected) + 1) != expected:
            raise damaged(path)
    if saved_size != size and size is not None:
        raise RefusedError(
            f"checkpoint {path} was written by {saved_size} ranks and cannot resume bit for bit on {size}; start "
            f"{saved_size} ranks, or add --resume-inexact to redistribute its state (the change is recorded)"
        )
    offsets = np.cumsum([len(line), *lengths]).tolist()
    return Checkpoint(path, step, saved_size, tuple(offsets))


def header_in(line: bytes) -> tuple[int, int, list[int]] | None:
    """Return (size, step, lengths of the sections) from the first line of a file, None if it is invalid."""
    try:
        header = json.loads(line)
        size, step, lengths = header["size"], header["step"], header["sections"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    numbers = [size, step, *lengths] if isinstance(lengths, list) else [None]
    # Not isinstance: true and false are whole numbers to it.
    plain = all(type(number) is int and 0 <= number < 2**62 for number in numbers)
    return (size, step, lengths) if plain and line.endswith(b"\n") and len(lengths) == size + 1 else None


def open_plain(path: Path) -> Any:
    """Open a file for reading; raises RefusedError for anything but a regular file, which could block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise RefusedError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RefusedError(f"checkpoint {path} is not a regular file and is refused")
    return open(descriptor, "rb")


def damaged(path: Path) -> RefusedError:
    """Return the error for a file whose bytes do not match its digest."""
    return RefusedError(f"checkpoint {path} is damaged; remove it to resume from the previous one")
