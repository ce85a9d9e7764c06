"""Sums over the rows of all ranks that rank 0 requests, for a solver that runs on rank 0 alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.heads.solution import Stopped

T = TypeVar("T")
Terms = TypeVar("Terms")


class RequestedSums(ABC, Generic[Terms]):
    """Sums over all ranks of `_partial`; rank 0 requests them and all ranks compute them together.

    Rank 0 alone decides on the next request, because arithmetic may differ between processors. `passes` counts
    requests; `exchanged_bytes` are the bytes that this rank sent to allreduces.
    """

    def __init__(self, *, world: World) -> None:
        self._world = world
        self.stopped = False
        """Whether this rank stops the fit."""
        self.passes, self.exchanged_bytes = 0, 0

    @abstractmethod
    def _partial(self, point: Tensor, terms: Terms) -> Tensor:
        """Return this rank's part of the sum; the shape and type are equal on all ranks."""

    def request(self, point: Tensor, terms: Terms) -> Tensor:
        """Return the sum over all ranks. Rank 0 calls this while every other rank is in `lead`. Collective.

        Raises:
            Stopped: a rank stops the fit.
        """
        asked = self._broadcast((point, terms))
        assert asked is not None, "this rank's"
        return self._sum(*asked)

    def lead(self, work: Callable[[], T]) -> T | None:
        """Run `work`, which may use `request`, on rank 0, while the other ranks follow; return its result. Collective.

        None on the other ranks, and if a rank stops the fit.
        """
        result = None
        if self._world.rank == 0:
            with suppress(Stopped):
                result = work()
            self._broadcast(None)
        else:
            while asked := self._broadcast(None):
                with suppress(Stopped):
                    self._sum(*asked)
        return result

    def count_bytes(self, tensor: Tensor) -> None:
        """Count the bytes that this rank sends to an allreduce."""
        if self._world.size > 1:
            self.exchanged_bytes += tensor.numel() * tensor.element_size()

    def _broadcast(self, asked: tuple[Tensor, Terms] | None) -> tuple[Tensor, Terms] | None:
        """Return rank 0's request, None at the end of its work."""
        message = None if asked is None else (asked[0].shape, asked[0].dtype, asked[1])
        message = self._world.broadcast_object(message, name="head.request")
        if message is None:
            return None
        shape, dtype, terms = message
        point = torch.empty(shape, dtype=dtype) if asked is None else asked[0].contiguous()
        self._world.broadcast_(point, name="head.point")
        return point, terms

    def _sum(self, point: Tensor, terms: Terms) -> Tensor:
        self.passes += 1
        part = self._partial(point, terms)
        # One more element: whether this rank stops the fit.
        flat = torch.cat([part.flatten(), torch.tensor([self.stopped], dtype=part.dtype)])
        self.count_bytes(flat)
        flat = self._world.allreduce_sum(flat, name="head.sums")
        if flat[-1]:
            raise Stopped
        return flat[:-1].view(part.shape)
