"""One rank of a job under `mpirun` or `horovodrun`: Horovod's collectives, a watch over them, and the job's end.

Two libraries whose blocking calls meet in different orders on different ranks wait for each other for ever. Collectives
are Horovod's alone; mpi4py starts MPI and ends the job when a rank fails.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvfreeze.errors import DivergedError, StallError, UsageError
from hvfreeze.ranks.machine.mpi_environment import claimed_size, seconds_in, tune_open_mpi, yield_when_crowded
from hvfreeze.ranks.world import SoloWorld, World

T = TypeVar("T")

GATHERED_BYTES = 2**30
"""What rank 0 receives at once: MPI counts bytes in 32 bits."""
STALL_SECONDS = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"


class HorovodWorld:
    """One rank of a Horovod job over MPI."""

    def __init__(self) -> None:
        # Fused transfers depend on timing, and sums on the place in the fused buffer: no two runs would be equal.
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
        os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "60")
        os.environ.setdefault(STALL_SECONDS, "600")
        self._stall_seconds = seconds_in(STALL_SECONDS)
        import horovod.torch as hvd

        # Whoever initialises MPI finalises it: with mpi4py first, MPI is still usable after Horovod's shutdown.
        # Where Horovod cannot be imported, MPI is not initialised: its end would wait for the other ranks'.
        from mpi4py import MPI

        hvd.init()
        self._mpi = MPI
        self._hvd = hvd
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        self._waiting_since = float("inf")
        self._waiting_for = ""
        threading.Thread(target=self._watch, name="stall-watch", daemon=True).start()

    def allreduce_sum(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the sum of `tensor` over ranks."""
        result = tensor.contiguous().clone()
        self.wait(self.start_allreduce_(result, name=name))
        return result

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> tuple[int, str]:
        """Start to sum `tensor` over ranks, in place."""
        return self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum), name

    def wait(self, handle: tuple[int, str]) -> None:
        """Return when the operation has ended.

        Raises:
            DivergedError: ranks gave different shapes or types under one name.
            StallError: a rank did not take part in time.
        """
        self._watched(lambda: self._hvd.synchronize(handle[0]), handle[1])

    def allgather_object(self, value: T, *, name: str) -> list[T]:
        """Return every rank's `value`."""
        gathered: list[T] = self._watched(lambda: self._hvd.allgather_object(value, name=name), name)
        return gathered

    def gather_bytes(self, data: Tensor, *, name: str) -> list[Tensor]:
        """Return on rank 0 every rank's `data`."""
        lengths = self.allgather_object(len(data), name=f"{name}.lengths")
        piece = GATHERED_BYTES // self.size
        parts: list[list[Tensor]] = [[] for _ in lengths]
        for number, start in enumerate(range(0, max(lengths), piece)):
            mine = data[start : start + piece]
            # All that a rank has goes to rank 0: an allgather would bring it to everybody.
            splits = torch.tensor([len(mine)] + [0] * (self.size - 1), dtype=torch.int32)
            handle = self._hvd.alltoall_async(mine, splits=splits, name=f"{name}.{number}")
            received, sizes = self._watched(partial(self._hvd.synchronize, handle), name)
            for part, arrived in zip(parts, torch.split(received, sizes.tolist())):
                part.append(arrived)
        return [torch.cat(part) for part in parts] if self.rank == 0 else []

    def broadcast_object(self, value: T, *, name: str, root: int = 0) -> T:
        """Return `root`'s value."""
        result: T = self._watched(lambda: self._hvd.broadcast_object(value, root_rank=root, name=name), name)
        return result

    def broadcast_(self, tensor: Tensor, *, name: str, root: int = 0) -> None:
        """Make `tensor` equal to `root`'s."""
        self._watched(lambda: self._hvd.broadcast_(tensor, root_rank=root, name=name), name)

    def barrier(self, *, name: str) -> None:
        """Return when every rank has called."""
        self.allreduce_sum(torch.zeros(1, dtype=torch.int32), name=f"barrier.{name}")

    def close(self) -> None:
        """Leave Horovod together: a rank that leaves early takes slower ones down."""
        self.barrier(name="close")
        self._hvd.shutdown()

    def abort(self, code: int) -> None:
        """End the whole job; peers may wait in a collective that this rank will never enter."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)

    def _watched(self, call: Callable[[], Any], name: str) -> Any:
        self._waiting_for, self._waiting_since = name, time.monotonic()
        try:
            return call()
        except self._hvd.HorovodInternalError as error:
            if "ismatched" in str(error):
                raise DivergedError(f"ranks disagree in '{name}': {error}") from error
            raise StallError(f"another rank left or did not take part in '{name}': {error}") from error
        finally:
            self._waiting_since = float("inf")

    def _watch(self) -> None:
        # Horovod's stall inspector runs on the coordinator and blocks with it when a rank is stopped.
        # Rank 0 has the first word where several ranks wait.
        limit = self._stall_seconds + (10 if self.rank == 0 else 20)
        while self._stall_seconds > 0:
            time.sleep(1)
            waited = time.monotonic() - self._waiting_since
            if waited > limit:
                text = f"rank {self.rank} on {socket.gethostname()} waited {waited:.0f} s for the others"
                print(f"hvfreeze: error: {text} in '{self._waiting_for}'; set {STALL_SECONDS}", file=sys.stderr)
                self.abort(StallError.exit_code)


def open_world() -> World:
    """Return this process's world: Horovod's under a launcher of several tasks, else alone.

    Raises:
        UsageError: a launcher started several tasks that cannot talk to each other.
    """
    tasks = claimed_size(os.environ)
    if tasks == 1:
        return SoloWorld()
    yield_when_crowded()
    tune_open_mpi()
    try:
        world = HorovodWorld()
    except ImportError as error:
        raise UsageError(
            f"a launcher started {tasks} tasks, but Horovod or mpi4py cannot be imported ({error}); "
            "build Horovod with MPI ('make setup'), or start a single process"
        ) from error
    if world.size < tasks:
        raise UsageError(
            f"the launcher says {tasks} tasks, but MPI connects {world.size}: they would become separate runs; "
            "start them with the mpirun of the MPI library that Horovod was built with ('hvfreeze doctor' names it)"
        )
    return world


def end_job_on_exception(world: World) -> None:
    """Make an uncaught exception on any rank end the whole job, with that rank's traceback first."""

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        lines = "".join(traceback.format_exception(kind, error, where))
        print(f"hvfreeze: rank {world.rank} of {world.size} failed\n{lines}", file=sys.stderr, end="", flush=True)
        world.abort(1)

    sys.excepthook = hook
