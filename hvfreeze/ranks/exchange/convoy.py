"""The parcels of a cut on their way through a step: each starts when it is full, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hvfreeze.ranks.exchange.buckets import Bucket
from hvfreeze.ranks.exchange.low_rank.parcel import LowRank
from hvfreeze.ranks.world import World

Parcel = Bucket | LowRank


class Convoy:
    """Parcels in the order in which they travel.

    Args:
        world: the ranks that sum.
        piece_bytes: what is summed at once; a larger message travels in pieces.
        low_rank: groups of matrices, which go first: what is sent twice leaves time for the rest in between.
        buckets: all else.
    """

    def __init__(
        self, world: World, *, piece_bytes: int, low_rank: Sequence[LowRank] = (), buckets: Sequence[Bucket] = ()
    ) -> None:
        self._world, self._piece_bytes = world, piece_bytes
        self.low_rank: list[LowRank] = list(low_rank)
        self.parcels: list[Parcel] = [*low_rank, *buckets]
        self._places = {slot: (parcel, i) for parcel in self.parcels for i, slot in enumerate(parcel.slots)}
        self._started = self._advanced = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing travels, because there is nobody to sum with."""
        return not self.parcels

    def begin(self) -> None:
        """Wait for all gradients again."""
        for parcel in self.parcels:
            parcel.begin()
        self._started = self._advanced = 0

    def lay_down(self, slot: int, gradient: Tensor | None) -> Tensor:
        """Take this rank's gradient of a slot, None for zero; return where the average will be."""
        parcel, i = self._places[slot]
        place = parcel.lay_down(i, gradient)
        parcel.version = parcel.flat._version
        return place

    def start_full(self) -> tuple[int, int]:
        """Start what is full, and let go on what has arrived; return the bytes of gradients and those beside them."""
        payload = tail = 0
        while self._started < len(self.parcels) and self.parcels[self._started].missing == 0:
            parcel = self.parcels[self._started]
            parcel.start(self._send)
            payload += parcel.payload_bytes
            tail += parcel.tail_bytes
            self._started += 1
        while self._advanced < self._started and self.parcels[self._advanced].has_arrived(self._world.poll):
            payload += self._go_on()
        return payload, tail

    def finish(self, check: Callable[[Parcel], None]) -> int:
        """Return when all sums are there, and the bytes that had still to be sent; `check` sees each parcel before."""
        payload, finished, poll = 0, 0, self._world.poll
        while self._advanced < len(self.parcels):
            # What low rank has yet to compute for groups that are there fills the wait for the last ones' first sums.
            behind = self.low_rank[finished : self._advanced]
            if behind and not self.parcels[self._advanced].has_arrived(poll) and behind[0].has_arrived(poll):
                payload += self._finish(behind[0], check)
                finished += 1
            else:
                payload += self._go_on()
        return payload + sum(self._finish(parcel, check) for parcel in self.parcels[finished:])

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return by parameter what low rank keeps from step to step, copied."""
        return {name: kept for parcel in self.low_rank for name, kept in parcel.state_dict().items()}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Continue from the entries whose parameters are here."""
        for parcel in self.low_rank:
            parcel.load_state_dict(state)

    def _finish(self, parcel: Parcel, check: Callable[[Parcel], None]) -> int:
        check(parcel)
        return parcel.finish(self._send, self._world.wait)

    def _go_on(self) -> int:
        parcel = self.parcels[self._advanced]
        self._advanced += 1
        return parcel.go_on(self._send, self._world.wait)

    def _send(self, wire: Tensor, name: str) -> list[Any]:
        pieces = wire.split(self._piece_bytes // wire.element_size())
        return [self._world.start_allreduce_(piece, name=f"{name}.{place}") for place, piece in enumerate(pieces)]
