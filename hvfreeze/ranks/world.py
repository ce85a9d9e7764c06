"""What ranks can say to each other: `World`, and `SoloWorld`, one process alone; and how an error on one ends the job.

A `World` moves tensors between ranks by collectives. `hvfreeze.ranks.horovod_world` has the one of a job.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")

LENGTH_BYTES = 8
"""What a message's length takes."""


class World(Protocol):
    """One rank's view of a job, or of some of its ranks, which are then numbered anew from 0.

    Every method but `abort` and `poll` is a collective: every rank must call it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    def allreduce_sum(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the sum of `tensor` over ranks, the same bits on every rank; int32, int64, float32, float64."""

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> Any:
        """Start to sum a contiguous `tensor` over ranks, in place; returns a handle for `wait`."""

    def poll(self, handle: Any) -> bool:
        """Tell whether `wait` would return at once. Not a collective."""

    def wait(self, handle: Any) -> None:
        """Return when the operation that `start_allreduce_` began has ended."""

    def allgather_object(self, value: T, *, name: str) -> list[T]:
        """Return every rank's `value`, in rank order; for small objects."""

    def gather_bytes(self, data: Tensor, *, name: str) -> list[Tensor]:
        """Return on rank 0 every rank's `data`, uint8 [any length], in rank order; on the others an empty list."""

    def scatter_bytes(self, data: Sequence[Tensor], *, name: str) -> Tensor:
        """Return to each rank its own part of rank 0's `data`, uint8 [any length], one a rank; others give none."""

    def broadcast_object(self, value: T, *, name: str, root: int = 0) -> T:
        """Return `root`'s value on every rank."""

    def broadcast_(self, tensor: Tensor, *, name: str, root: int = 0) -> None:
        """Make a contiguous `tensor` of any length equal to `root`'s on every rank."""

    def barrier(self, *, name: str) -> None:
        """Return when every rank has called."""

    def among(self, ranks: Sequence[int]) -> World | None:
        """Return the world of `ranks` alone, None on a rank that is not one of them.

        Every rank of the job calls this, with the same `ranks`, while nothing else is on its way.
        """

    def close(self) -> None:
        """Leave the job in good order, after a last barrier; MPI cannot be used any more. A part of it stays."""

    def abort(self, code: int) -> None:
        """End the whole job at once with exit code `code`. Not a collective."""


class SoloWorld:
    """One process alone: every collective is the identity."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def allreduce_sum(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return a copy of `tensor`."""
        return tensor.clone()

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> None:
        """Leave `tensor` as it is."""

    def poll(self, handle: None) -> bool:
        """Return True."""
        return True

    def wait(self, handle: None) -> None:
        """Return at once."""

    def allgather_object(self, value: T, *, name: str) -> list[T]:
        """Return `[value]`."""
        return [value]

    def gather_bytes(self, data: Tensor, *, name: str) -> list[Tensor]:
        """Return `[data]`."""
        return [data]

    def scatter_bytes(self, data: Sequence[Tensor], *, name: str) -> Tensor:
        """Return the only part of `data`."""
        return data[0]

    def broadcast_object(self, value: T, *, name: str, root: int = 0) -> T:
        """Return `value`."""
        return value

    def broadcast_(self, tensor: Tensor, *, name: str, root: int = 0) -> None:
        """Leave `tensor` as it is."""

    def barrier(self, *, name: str) -> None:
        """Return at once."""

    def among(self, ranks: Sequence[int]) -> World:
        """Return this world."""
        return self

    def close(self) -> None:
        """Return at once."""

    def abort(self, code: int) -> None:
        """End this process."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class LoneRank(SoloWorld):
    """A rank of a job among no others: every collective is the identity."""

    def __init__(self, job: World) -> None:
        self._job = job

    def abort(self, code: int) -> None:
        """End the whole job."""
        self._job.abort(code)


def behind_length(content: bytes) -> bytes:
    """Return a message that tells its length, so that several can travel in one piece; see `taken_apart`."""
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def taken_apart(messages: bytes) -> list[bytes]:
    """Return the contents of messages that lie one behind the other."""
    contents, start = [], 0
    while start < len(messages):
        start += LENGTH_BYTES
        end = start + int.from_bytes(messages[start - LENGTH_BYTES : start], "little")
        contents.append(messages[start:end])
        start = end
    return contents


def end_job_on_exception(world: World) -> None:
    """Make an uncaught exception on any rank end the whole job, with that rank's traceback first."""

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        lines = "".join(traceback.format_exception(kind, error, where))
        print(f"hvfreeze: rank {world.rank} of {world.size} failed\n{lines}", file=sys.stderr, end="", flush=True)
        world.abort(1)

    sys.excepthook = hook
