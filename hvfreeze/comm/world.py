"""The communication interface of a rank: `World`, the single-process `SoloWorld`, and the end of a job on errors.

A `World` exchanges tensors between ranks by collectives. `hvfreeze.comm.horovod_world` implements it for a job.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class World:
    """A job, or a subset of its ranks (renumbered from 0), as seen by one rank.

    Every method except `abort` and `poll` is a collective: every rank must call it.
    """

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def allreduce_sum(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the sum of `tensor` over ranks, with the same bits on every rank; int32, int64, float32 or float64."""
        return tensor.clone()

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> Any:
        """Start to sum a contiguous `tensor` over ranks in place; return a handle for `wait`."""

    def poll(self, handle: Any) -> bool:
        """Return True if `wait` would not block. Not a collective."""
        return True

    def wait(self, handle: Any) -> Any:
        """Wait for the operation that `start_allreduce_` started."""

    def allgather_object(self, value: T, *, name: str) -> list[T]:
        """Return every rank's `value`, in rank order; for small objects."""
        return [value]

    def allgather_rows(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the rows of all ranks' `tensor`, (any number, ...), in rank order; int64, float32 or float64."""
        return tensor

    def gather_bytes(self, data: Tensor, *, name: str) -> list[Tensor]:
        """Return every rank's `data`, uint8 of any length, on rank 0 in rank order, and [] on other ranks."""
        return [data]

    def scatter_bytes(self, data: Sequence[Tensor], *, name: str) -> Tensor:
        """Return to each rank its part of rank 0's `data`, one uint8 tensor per rank; other ranks pass None."""
        return data[0]

    def broadcast_object(self, value: T, *, name: str, root: int = 0) -> T:
        """Return `root`'s value on every rank."""
        return value

    def broadcast_(self, tensor: Tensor, *, name: str, root: int = 0) -> None:
        """Set a contiguous `tensor` of any length to `root`'s on every rank."""

    def barrier(self, *, name: str) -> None:
        """Wait until every rank has called."""

    def among(self, ranks: Sequence[int]) -> World | None:
        """Return the world of `ranks`, or None on a rank that is not one of them.

        Every rank of the job must call this with the same `ranks`, while no operation is pending.
        """
        return self

    def close(self) -> None:
        """Leave the job after a final barrier; MPI cannot be used afterwards. The world of a subset stays open."""

    def abort(self, code: int) -> None:
        """End the whole job at once with exit code `code`. Not a collective."""
        flush_streams()
        os._exit(code)


class SoloWorld(World):
    """A single process."""


class LoneRank(World):
    """A rank of a job that is treated as a single process."""

    def __init__(self, job: World) -> None:
        self.abort = job.abort  # type: ignore[method-assign]


def flush_streams() -> None:
    """Flush standard output and error, ignoring failures: a job must end even if its output is closed."""
    for stream in (sys.stdout, sys.stderr):
        # A daemon may have started this process without one.
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()


def end_job_on_exception(world: World) -> None:
    """End the whole job on an uncaught exception of any rank, after printing that rank's traceback."""
    sys.excepthook = lambda kind, error, where: end_job(world, error)


def end_job(world: World, error: BaseException) -> None:
    """Print this rank's traceback, and end the whole job. Not a collective."""
    lines = "".join(traceback.format_exception(error))
    print(f"hvfreeze: rank {world.rank} of {world.size} failed\n{lines}", file=sys.stderr, end="", flush=True)
    world.abort(1)
