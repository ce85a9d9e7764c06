"""A `World` of Horovod ranks started by `mpirun` or `horovodrun`.

If two libraries block in different orders on different ranks, they deadlock. So all collectives are Horovod's; MPI is
only used for calls that never wait for another rank, on separate communicators.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.mpi_environment import (
    CYCLE_TIME,
    claimed_tasks,
    interrupt_ends_job,
    leave_mpi,
    start_mpi,
    tune_open_mpi,
    yield_when_crowded,
)
from hvfreeze.comm.stall_watch import StallWatch, stall_limit
from hvfreeze.comm.world import LoneRank, SoloWorld, World, flush_streams
from hvfreeze.errors import DivergedError, StallError, UsageError
from hvfreeze.imports import imported_beside, interrupted_after

T = TypeVar("T")

PIECE_BYTES = 2**30
"""Largest message in bytes: MPI counts in 32 bits and aborts beyond."""
HEAD_BYTES = 1016
"""Bytes of an object that are broadcast together with its length, which saves a second message for most objects."""
LENGTH_BYTES = 8
DYNAMIC_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"


class HorovodWorld(World):
    """A Horovod job over MPI, or a subset of its ranks (see `among`)."""

    def __init__(self, *, beside: str = "") -> None:
        """Initialise Horovod with the other ranks; import the module `beside` meanwhile, if it is not empty."""
        # Fused transfers depend on timing, and sums on the place in the fused buffer: no two runs would be equal.
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
        self.watch = StallWatch(stall_limit(), self.abort)
        os.environ["HOROVOD_STALL_CHECK_DISABLE"] = "1"
        yield_when_crowded()
        tune_open_mpi()
        with interrupted_after():
            import horovod.torch as hvd
        with interrupt_ends_job():
            # The library that initialises MPI finalises it. It is not Horovod, so that Horovod can end and restart.
            # Horovod is imported first: if that fails, MPI must not be initialised, or its end would wait for others.
            with self.watch.waiting("start"):
                self.mpi = start_mpi()
            # A rank that imports does not wait for others.
            with imported_beside(beside) if beside else nullcontext(), self.watch.waiting("start"):
                hvd.init()
                self.hosts: list[str] = self.mpi.COMM_WORLD.allgather(socket.gethostname())
                self.watch.connect(self.mpi, self.mpi.COMM_WORLD.Dup(), self.hosts)
        self._hvd, self._set = hvd, hvd.global_process_set
        self._sets: dict[tuple[int, ...], Any] = {}
        self.rank, self.size = int(hvd.rank()), int(hvd.size())
        self.local_rank, self.local_size = int(hvd.local_rank()), int(hvd.local_size())
        self.ranks = tuple(range(self.size))  # by their numbers in the job

    def allreduce_sum(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the sum of `tensor` over ranks."""
        result = tensor.contiguous().clone()
        self.wait(self.start_allreduce_(result, name=name))
        return result

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> tuple[int, str]:
        """Start to sum `tensor` over ranks, in place."""
        with self._judged(name):
            return self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum, process_set=self._set), name

    def poll(self, handle: tuple[int, str]) -> bool:
        """Return True if `wait` would return at once."""
        return bool(self._hvd.poll(handle[0]))

    def wait(self, handle: tuple[int, str]) -> Any:
        """Wait for the operation and return its result; raises like `_judged`."""
        number, name = handle
        with self._judged(name), self.watch.waiting(name):
            return self._hvd.synchronize(number)

    def allgather_object(self, value: T, *, name: str) -> list[T]:
        """Return every rank's `value`."""
        local = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        gathered = io.BytesIO(self._collect(self._hvd.allgather_async, local, name, self._set).numpy().tobytes())
        return [pickle.load(gathered) for _ in range(self.size)]

    def allgather_rows(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the rows of all ranks."""
        rows: Tensor = self._collect(self._hvd.allgather_async, tensor.contiguous(), name, self._set)
        return rows

    def gather_bytes(self, data: Tensor, *, name: str) -> list[Tensor]:
        """Return on rank 0 every rank's `data`."""
        lengths = self.allgather_object(len(data), name=f"{name}.lengths")
        parts = [torch.empty(length, dtype=torch.uint8) for length in lengths] if self.rank == 0 else []
        for number, place in self._pieces(max(lengths)):
            local = data[place]
            # An alltoall with parts for rank 0 only; an allgather would send them to all ranks.
            received, sizes = self._deal([local, *[local[:0]] * (self.size - 1)], name=f"{name}.{number}")
            arrived = received.split(sizes.tolist())
            if self.rank == 0 and max(lengths) <= place.stop and number == 0:
                return list(arrived)
            for part, piece in zip(parts, arrived):
                part[place] = piece
        return parts

    def scatter_bytes(self, data: Sequence[Tensor], *, name: str) -> Tensor:
        """Return this rank's part of rank 0's `data`."""
        lengths = self.broadcast_object([len(part) for part in data], name=f"{name}.lengths")
        local = torch.empty(lengths[self.rank], dtype=torch.uint8)
        nothing = torch.empty(0, dtype=torch.uint8)
        for number, place in self._pieces(max(lengths)):
            parts = [part[place] for part in data] if self.rank == 0 else [nothing] * self.size
            local[place] = self._deal(parts, name=f"{name}.{number}")[0]
        return local

    def broadcast_object(self, value: T, *, name: str, root: int = 0) -> T:
        """Return `root`'s value."""
        content = pickle.dumps(value) if self.rank == root else b""
        head = len(content).to_bytes(LENGTH_BYTES, "little") + content[:HEAD_BYTES]
        first = torch.frombuffer(bytearray(head.ljust(LENGTH_BYTES + HEAD_BYTES)), dtype=torch.uint8)
        self.broadcast_(first, name=f"{name}.head", root=root)
        received = first.numpy().tobytes()
        length = int.from_bytes(received[:LENGTH_BYTES], "little")
        if length > HEAD_BYTES:
            rest = torch.frombuffer(bytearray(content[HEAD_BYTES:].ljust(length - HEAD_BYTES)), dtype=torch.uint8)
            self.broadcast_(rest, name=name, root=root)
            received += rest.numpy().tobytes()
        result: T = value if self.rank == root else pickle.loads(received[LENGTH_BYTES:])
        return result

    def broadcast_(self, tensor: Tensor, *, name: str, root: int = 0) -> None:
        """Make `tensor` equal to `root`'s."""
        for number, piece in enumerate(tensor.view(-1).split(PIECE_BYTES // tensor.element_size())):
            called = name if number == 0 else f"{name}.{number}"
            self._collect(self._hvd.broadcast_async_, piece, self.ranks[root], called, self._set)

    def barrier(self, *, name: str) -> None:
        """Return when every rank has called."""
        self.allreduce_sum(torch.zeros(1, dtype=torch.int32), name=f"barrier.{name}")

    def among(self, ranks: Sequence[int]) -> World | None:
        """Return the world of `ranks`; all ranks, in any order, give this world."""
        if len(self.ranks) != self._hvd.size():
            raise ValueError("among() must be called on the world of the whole job")
        members = tuple(sorted(set(ranks)))
        if members == self.ranks:
            return self
        if len(members) > 1 and members not in self._sets:
            with self.watch.waiting("process sets"):
                # With this setting Horovod checks for new sets in every cycle; a job without sets avoids that cost.
                if os.environ.get(DYNAMIC_SETS) != "1":
                    self.restart(DYNAMIC_SETS, "1")
                self._sets[members] = self._hvd.add_process_set(list(members))
        if self.rank not in members or len(members) == 1:
            return LoneRank(self) if members == (self.rank,) else None
        part = copy.copy(self)
        part._set, part.ranks = self._sets[members], members
        part.rank, part.size = members.index(self.rank), len(members)
        here = [rank for rank in members if self.hosts[rank] == self.hosts[self.rank]]
        part.local_rank, part.local_size = here.index(self.rank), len(here)
        return part

    def restart(self, variable: str, value: str) -> None:
        """Restart Horovod on all ranks with an environment variable that it reads at initialisation. Collective.

        Raises:
            UsageError: a cycle time is already set on some rank; on all ranks. On a restart, Horovod 0.28 keeps values
                that variables have fixed, and crashes if both the cycle time and fusion (which must be off here) are
                fixed.
        """

        def check() -> None:
            if CYCLE_TIME in os.environ:
                raise UsageError(
                    f"${CYCLE_TIME} ({os.environ[CYCLE_TIME]}) is set, so Horovod cannot be restarted with "
                    f"{variable}={value}; unset it, or set {variable}={value} too"
                )

        raise_on_all_ranks(self, check, name="anew")
        with self.watch.waiting("start anew"):
            self._hvd.shutdown()
            os.environ[variable] = value
            self._hvd.init()

    def close(self) -> None:
        """Leave Horovod and MPI together with all ranks: a rank that leaves early would take slower ones down."""
        self.barrier(name="close")
        if len(self.ranks) < self._hvd.size():
            return
        with self.watch.waiting("close"):
            self._hvd.shutdown()
            self.watch.disconnect()
            leave_mpi(self.mpi)

    def abort(self, code: int) -> None:
        """End the whole job at once; peers may wait in a collective that this rank will never enter."""
        flush_streams()
        if self.mpi.Is_finalized():
            os._exit(code)
        self.mpi.COMM_WORLD.Abort(code)

    def _collect(self, begin: Callable[..., int], *arguments: Any) -> Any:
        """Start an operation and return its result; the last argument but one is its name."""
        name = arguments[-2]
        with self._judged(name):
            number = begin(*arguments)
        return self.wait((number, name))

    @contextmanager
    def _judged(self, name: str) -> Iterator[None]:
        """Raise DivergedError if ranks gave different shapes or types for one name, StallError if a rank has left."""
        try:
            yield
        except self._hvd.HorovodInternalError as error:
            if "ismatched" in str(error):
                raise DivergedError(
                    f"ranks disagree in collective '{name}': {error}; start all ranks with the same command"
                ) from error
            raise StallError(f"another rank ended or did not take part in collective '{name}': {error}") from error

    def _pieces(self, length: int) -> Iterator[tuple[int, slice]]:
        # Rank 0 holds a piece of every rank at once.
        step = PIECE_BYTES // self.size
        return ((number, slice(start, start + step)) for number, start in enumerate(range(0, length, step)))

    def _deal(self, parts: Sequence[Tensor], *, name: str) -> tuple[Tensor, Tensor]:
        """Send each rank its part, uint8; return the parts received, and their lengths."""
        splits = torch.tensor([len(part) for part in parts], dtype=torch.int32)
        received, sizes = self._collect(self._hvd.alltoall_async, torch.cat(list(parts)), splits, name, self._set)
        return received, sizes


def open_world(*, beside: str = "") -> World:
    """Return this process's world: Horovod's if a launcher started several tasks, else a single rank.

    For a whole program. A training script uses `integration.script_world`, which also sets Horovod's cycle time.

    Args:
        beside: a module to import while the ranks start, empty for none.

    Raises:
        UsageError: a launcher started several tasks that MPI does not connect.
    """
    tasks, variable = claimed_tasks(os.environ)
    if tasks == 1:
        return SoloWorld()
    started = f"the launcher started {tasks} tasks (${variable} is {os.environ[variable]})"
    try:
        world = HorovodWorld(beside=beside)
    except ImportError as error:
        raise UsageError(
            f"{started}, but Horovod or mpi4py cannot be imported ({error}). Build Horovod with MPI ('make setup') "
            f"and start the ranks with mpirun; to run a single process, unset {variable}"
        ) from error
    if world.size < tasks:
        raise UsageError(
            f"{started}, but MPI connects only {world.size}, so each would be a separate run. Start them with "
            f"mpirun -np {tasks} of the MPI library that Horovod was built with ('hvfreeze doctor' names it); "
            f"torchrun and similar launchers do not start MPI ranks. To run a single process, unset {variable}"
        )
    return world
