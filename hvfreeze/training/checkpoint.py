"""Checkpoints: one file each, published atomically, verified by a digest, loaded without running anything.

A file is a line of JSON (`sha256`, `bytes`, `step`, `size`) followed by a `torch.save` archive of plain values and
tensors; the digest covers the line too. Rank 0 writes and reads; the other ranks receive the bytes, so that only rank
0 needs the directory.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvfreeze.errors import RefusedError
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World
from hvfreeze.runs.publishing import publish

KEPT = 2


def path_of(directory: Path, step: int) -> Path:
    """Return the file of the checkpoint after `step` steps."""
    return directory / f"step-{step:08d}.pt"


def newest(directory: Path) -> Path | None:
    """Return the checkpoint with the most steps, None where there is none."""
    return max(directory.glob("step-*.pt"), default=None)


def save(directory: Path, state: dict[str, Any], *, step: int, size: int) -> Path:
    """Write `state` so that a crash at any moment leaves either the old checkpoints or the new one too.

    Raises:
        RefusedError: the file cannot be written, as on a full disk; older checkpoints are untouched.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getbuffer()
    header = {"sha256": digest_of(payload, step=step, size=size), "bytes": len(payload), "step": step, "size": size}
    target = path_of(directory, step)
    for left in directory.glob(".step-*.tmp"):
        left.unlink()
    publish(target, [json.dumps(header).encode() + b"\n", payload])
    for old in sorted(directory.glob("step-*.pt"))[:-KEPT]:
        old.unlink()
    return target


def digest_of(payload: bytes | memoryview, *, step: int, size: int) -> str:
    """Return the SHA-256 that binds a payload to its step and world size, as hex."""
    digest = hashlib.sha256(f"{step} {size}\n".encode())
    digest.update(payload)
    return digest.hexdigest()


def load(path: Path, *, size: int) -> dict[str, Any]:
    """Return the state in `path`, verified.

    Raises:
        RefusedError: the file is damaged, of another world size, or holds more than plain values.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RefusedError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    return decode(raw, name=str(path), size=size)


def decode(raw: bytes, *, name: str, size: int) -> dict[str, Any]:
    """Return the state in the bytes of a checkpoint file; see `load`."""
    head, _, payload = raw.partition(b"\n")
    try:
        header = json.loads(head)
        saved_size = int(header["size"])
        digest = digest_of(payload, step=header["step"], size=header["size"])
        intact = header["bytes"] == len(payload) and header["sha256"] == digest
    except (ValueError, KeyError, TypeError):
        intact, saved_size = False, size
    if not intact:
        raise RefusedError(f"checkpoint {name} is damaged; remove it to resume from the one before it")
    if saved_size != size:
        raise RefusedError(f"checkpoint {name} was written by {saved_size} ranks and cannot resume on {size}")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(payload), weights_only=True)
    except Exception as error:  # what is no archive of plain values makes the unpickler raise anything
        raise RefusedError(f"checkpoint {name} holds more than plain values and is refused") from error
    if not isinstance(state, dict):
        raise RefusedError(f"checkpoint {name} holds no run's state and is refused")
    return state


def load_everywhere(directory: Path, world: World) -> dict[str, Any] | None:
    """Return the newest checkpoint's state on every rank, None where there is none; only rank 0 reads files.

    Collective: every rank of `world` must call this.

    Raises:
        RefusedError: see `load`.
    """

    def read() -> bytes | None:
        path = newest(directory) if world.rank == 0 else None
        if path is None:
            return None
        load(path, size=world.size)
        return path.read_bytes()

    raw = together(world, read, name="checkpoint.read")
    length = world.broadcast_object(None if raw is None else len(raw), name="checkpoint.length")
    if length is None:
        return None
    data = torch.empty(length, dtype=torch.uint8)
    if raw is not None:
        data.numpy()[:] = np.frombuffer(raw, dtype=np.uint8)
    world.broadcast_(data, name="checkpoint.bytes")
    return decode(data.numpy().tobytes(), name=str(directory), size=world.size)
