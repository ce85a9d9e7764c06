"""Ranks that are threads of this process, for what ranks say to each other beside their gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.errors import HvfreezeError

T = TypeVar("T")
SECONDS = 60.0
"""After which a rank that waits for others gives up."""


class ThreadRank(World):
    """One of `size` ranks that share a barrier and a board."""

    def __init__(self, rank: int, meeting: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.size = rank, len(board)
        self._meeting, self._board = meeting, board

    def allgather_object(self, value: T, *, name: str) -> list[T]:
        self._board[self.rank] = (name, value)
        self._meeting.wait(SECONDS)
        found = list(self._board)
        self._meeting.wait(SECONDS)
        assert len({theirs for theirs, _ in found}) == 1, found
        return [value for _, value in found]

    def allreduce_sum(self, tensor: Tensor, *, name: str) -> Tensor:
        return torch.stack(self.allgather_object(tensor.clone(), name=name)).sum(0).to(tensor.dtype)

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> None:
        tensor.copy_(self.allreduce_sum(tensor, name=name))

    def gather_bytes(self, data: Tensor, *, name: str) -> list[Tensor]:
        found = self.allgather_object(data.clone(), name=name)
        return found if self.rank == 0 else []

    def allgather_rows(self, tensor: Tensor, *, name: str) -> Tensor:
        return torch.cat(self.allgather_object(tensor, name=name))

    def broadcast_object(self, value: T, *, name: str, root: int = 0) -> T:
        return self.allgather_object(value, name=name)[root]

    def broadcast_(self, tensor: Tensor, *, name: str, root: int = 0) -> None:
        tensor.copy_(self.allgather_object(tensor.clone(), name=name)[root])


def on_ranks(size: int, work: Callable[[World], T]) -> Sequence[T]:
    """Return what `work` returns on each of `size` ranks, in their order, or raise what the first that fails raises."""
    meeting, board = threading.Barrier(size), [None] * size

    def run(rank: int) -> T:
        try:
            return work(ThreadRank(rank, meeting, board))
        except BaseException as error:
            # Others that raise it too have perhaps not left the last meeting yet.
            if not (isinstance(error, HvfreezeError) and error.everywhere):
                meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        each = [pool.submit(run, rank) for rank in range(size)]
    raised = [error for one in each if (error := one.exception()) is not None]
    if raised:
        raise next((error for error in raised if not isinstance(error, threading.BrokenBarrierError)), raised[0])
    return [one.result() for one in each]
