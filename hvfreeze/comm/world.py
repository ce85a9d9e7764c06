"""What ranks can say to each other: `World`, the identity for one process alone; and how an error ends the job.

A `World` moves tensors between ranks by collectives. `hvfreeze.comm.horovod_world` has the one of a job.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class World:
    """One rank's view of a job, or of some of its ranks, which are then numbered anew from 0; here, of one alone.

    Every method but `abort` and `poll` is a collective: every rank must call it.
    """

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def allreduce_sum(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the sum of `tensor` over ranks, the same bits on every rank; int32, int64, float32, float64."""
        return tensor.clone()

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> Any:
        """Start to sum a contiguous `tensor` over ranks, in place; returns a handle for `wait`."""

    def poll(self, handle: Any) -> bool:
        """Tell whether `wait` would return at once. Not a collective."""
        return True

    def wait(self, handle: Any) -> Any:
        """Return when the operation that `start_allreduce_` began has ended."""

    def allgather_object(self, value: T, *, name: str) -> list[T]:
        """Return every rank's `value`, in rank order; for small objects."""
        return [value]

    def allgather_rows(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the rows of all ranks' `tensor`, (any number, ...), in rank order; int64, float32, float64."""
        return tensor

    def gather_bytes(self, data: Tensor, *, name: str) -> list[Tensor]:
        """Return on rank 0 every rank's `data`, uint8 [any length], in rank order; on the others an empty list."""
        return [data]

    def scatter_bytes(self, data: Sequence[Tensor], *, name: str) -> Tensor:
        """Return to each rank its own part of rank 0's `data`, uint8 [any length], one a rank; others give none."""
        return data[0]

    def broadcast_object(self, value: T, *, name: str, root: int = 0) -> T:
        """Return `root`'s value on every rank."""
        return value

    def broadcast_(self, tensor: Tensor, *, name: str, root: int = 0) -> None:
        """Make a contiguous `tensor` of any length equal to `root`'s on every rank."""

    def barrier(self, *, name: str) -> None:
        """Return when every rank has called."""

    def among(self, ranks: Sequence[int]) -> World | None:
        """Return the world of `ranks` alone, None on a rank that is not one of them.

        Every rank of the job calls this, with the same `ranks`, while nothing else is on its way.
        """
        return self

    def close(self) -> None:
        """Leave the job in good order, after a last barrier; MPI cannot be used any more. A part of it stays."""

    def abort(self, code: int) -> None:
        """End the whole job at once with exit code `code`. Not a collective."""
        flush_streams()
        os._exit(code)


class SoloWorld(World):
    """One process alone."""


class LoneRank(World):
    """A rank of a job among no others."""

    def __init__(self, job: World) -> None:
        self.abort = job.abort  # type: ignore[method-assign]


def flush_streams() -> None:
    """Pass on what was printed, as far as somebody takes it: a job must end also without its output."""
    for stream in (sys.stdout, sys.stderr):
        # A daemon may have started this process without one.
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()


def end_job_on_exception(world: World) -> None:
    """Make an uncaught exception on any rank end the whole job, with that rank's traceback first."""

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        lines = "".join(traceback.format_exception(kind, error, where))
        print(f"hvfreeze: rank {world.rank} of {world.size} failed\n{lines}", file=sys.stderr, end="", flush=True)
        world.abort(1)

    sys.excepthook = hook
