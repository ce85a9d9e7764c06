"""Point-to-point messages between ranks, separate from Horovod's collectives: activations, gradients, features, labels.

A lane is a separate communicator, so messages of different purposes cannot mix. No call here waits for a rank that may
wait for this one: a send is started without waiting, and a receive is waited for only after it was started. So ranks
need no common order of calls, not even with Horovod, whose thread uses MPI at the same time.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvfreeze.comm.horovod_world import PIECE_BYTES, HorovodWorld
from hvfreeze.comm.world import World
from hvfreeze.errors import DivergedError, UsageError

SEQUENCES = 2**15
"""Number of tags; MPI guarantees tags up to 32767."""


@dataclass
class LaneCounts:
    """Bytes that one rank sent on a lane, and seconds that it waited there."""

    bytes_sent: int = 0
    wait_seconds: float = 0.0


class Wire:
    """One rank's end of all lanes. Both ends know shapes and types, so only the elements are sent.

    This one is for a single rank: it receives copies of its own messages; nothing is sent or counted.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self.counts = {lane: LaneCounts() for lane in lanes}
        self._queues: dict[tuple[str, int], deque[Tensor]] = defaultdict(deque)

    def bytes_sent(self, lanes: Iterable[str] | None = None) -> dict[str, int]:
        """Return the bytes that this rank has sent on each of `lanes`, by default on all."""
        return {lane: self.counts[lane].bytes_sent for lane in (self.counts if lanes is None else lanes)}

    def count_on(self, sent: Mapping[str, int]) -> None:
        """Set the byte counts to those of an earlier part of the run, by lane."""
        for lane, number in sent.items():
            self.counts[lane].bytes_sent = number

    def wait_seconds(self, lanes: Iterable[str] | None = None) -> float:
        """Return the seconds that this rank has waited on `lanes`, by default on all."""
        return sum(self.counts[lane].wait_seconds for lane in (self.counts if lanes is None else lanes))

    def put(self, tensor: Tensor, *, to: int, lane: str, seq: int = 0) -> None:
        """Start to send `tensor`, of any type, to rank `to`; it must not change until `drain`."""
        assert to == 0 and lane in self.counts, (to, lane)
        self._queues[lane, seq].append(tensor.detach().clone(memory_format=torch.contiguous_format))

    def expect(self, shape: Sequence[int], *, dtype: torch.dtype, source: int, lane: str, seq: int = 0) -> None:
        """Start to receive the result of a later `get` with the same arguments, to overlap the transfer.

        For equal lane, rank and number, the first `get` returns the first expected tensor.
        """

    def get(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, source: int, lane: str, seq: int = 0
    ) -> Tensor:
        """Return the next tensor that rank `source` sent on `lane` under the number `seq`; the caller owns it.

        Raises:
            DivergedError: the tensor that came has another number of bytes; on this rank only.
        """
        tensor = self._queues[lane, seq].popleft()
        if (tuple(tensor.shape), tensor.dtype) != (tuple(shape), dtype):
            raise DivergedError(
                f"lane {lane}: received {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {tuple(shape)}"
            ).on_this_rank()
        return tensor

    def drain(self) -> None:
        """Wait until all sends are complete; the sent tensors may change after that."""

    def close(self) -> None:
        """Drain, drop expected tensors that have not arrived, and close the lanes. Collective."""


def open_wire(world: World, lanes: Sequence[str]) -> Wire:
    """Return this rank's end of `lanes` between the ranks of `world`, which must be the whole job's. Collective.

    Raises:
        UsageError: other code initialised MPI for calls from one thread only.
    """
    return MpiWire(world, lanes) if isinstance(world, HorovodWorld) else Wire(lanes)


class MpiWire(Wire):
    """The lanes of a rank in a job: MPI's non-blocking messages."""

    def __init__(self, world: HorovodWorld, lanes: Sequence[str]) -> None:
        super().__init__(lanes)
        mpi = self._mpi = world.mpi
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise UsageError(
                "MPI was initialized for a single thread; call open_world() before any other code initializes MPI"
            )
        self._watch, self._rank = world.watch, world.rank
        with self._watch.waiting("lanes"):
            self._comms = {lane: mpi.COMM_WORLD.Dup() for lane in lanes}
        for comm in self._comms.values():
            comm.Set_errhandler(mpi.ERRORS_RETURN)
        self._sent: deque[tuple[str, Any, Tensor]] = deque()
        self._expected: dict[tuple[str, int, int], deque[tuple[Tensor, list[Any]]]] = defaultdict(deque)

    def put(self, tensor: Tensor, *, to: int, lane: str, seq: int = 0) -> None:
        """Start to send `tensor`."""
        while self._sent and self._sent[0][1].Test():
            self._sent.popleft()
        tensor = tensor.detach().contiguous()
        for piece in pieces_of(tensor):
            request = self._comms[lane].Isend([piece, self._mpi.BYTE], dest=to, tag=seq % SEQUENCES)
            self._sent.append((lane, request, tensor))
        self.counts[lane].bytes_sent += tensor.nbytes

    def expect(self, shape: Sequence[int], *, dtype: torch.dtype, source: int, lane: str, seq: int = 0) -> None:
        """Start to receive a tensor."""
        buffer = torch.empty(tuple(shape), dtype=dtype)
        requests = [
            self._comms[lane].Irecv([piece, self._mpi.BYTE], source=source, tag=seq % SEQUENCES)
            for piece in pieces_of(buffer)
        ]
        self._expected[lane, source, seq].append((buffer, requests))

    def get(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, source: int, lane: str, seq: int = 0
    ) -> Tensor:
        """Return the received tensor."""
        expected = self._expected[lane, source, seq]
        if not expected:
            self.expect(shape, dtype=dtype, source=source, lane=lane, seq=seq)
        buffer, requests = expected.popleft()
        if not expected:
            del self._expected[lane, source, seq]
        assert (tuple(buffer.shape), buffer.dtype) == (tuple(shape), dtype), (
            "get() must ask for the tensor that expect() announced"
        )
        received = sum(self._wait(lane, request, f"wire.{lane} from rank {source}") for request in requests)
        if received != buffer.nbytes:
            raise DivergedError(
                f"rank {source} sent {received} bytes on lane {lane}, but {buffer.nbytes} were expected"
            ).on_this_rank()
        return buffer

    def drain(self) -> None:
        """Wait until all sends are complete."""
        while self._sent:
            lane, request, _ = self._sent[0]
            self._wait(lane, request, f"wire.{lane} to a neighbour")
            self._sent.popleft()

    def close(self) -> None:
        """Drain, and free the lanes."""
        self.drain()
        for request in [r for queue in self._expected.values() for _, requests in queue for r in requests]:
            request.Cancel()
            request.Wait()
        self._expected.clear()
        for comm in self._comms.values():
            comm.Free()
        self._comms = {}

    def _wait(self, lane: str, request: Any, what: str) -> int:
        """Wait until the message is complete; return its number of bytes."""
        status, started = self._mpi.Status(), time.perf_counter()
        try:
            with self._watch.waiting(what):
                request.Wait(status)
        except self._mpi.Exception as error:
            raise DivergedError(
                f"rank {self._rank}, lane {lane}: {error}; ranks expect different tensors"
            ).on_this_rank() from error
        self.counts[lane].wait_seconds += time.perf_counter() - started
        received: int = status.Get_count(self._mpi.BYTE)
        return received


def pieces_of(tensor: Tensor) -> list[Any]:
    """Return the bytes of a contiguous tensor as arrays that share its memory, none longer than MPI can count."""
    flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return [piece.numpy() for piece in flat.split(PIECE_BYTES)] or [flat.numpy()]
