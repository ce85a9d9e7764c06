"""What a rank owns of an MLP and what it trains, and how the one becomes the other: nothing is added up on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvfreeze.comm.point_to_point import Wire
from hvfreeze.model.mlp import Mlp
from hvfreeze.strategies.subnets.dealing import Deal, Parameter, Table, put, take

DEALT, RETURNED, SEEN, WHOLE = "dealt", "returned", "evaluation.returned", "evaluation.whole"
LANES = (DEALT, RETURNED, SEEN, WHOLE)
"""From owners to trainers, back at a round's end, back in its middle to be looked at, and to all ranks to be so."""


class Exchange:
    """Holds this rank's entries and moves them; every method but `give_up_whole` is a collective.

    Args:
        table: who holds what.
        whole: the module whose parameters are shared out; they are there while the model is looked at.
        piece: the network of this rank's neurons, of which the entries change with every deal.
        wire: between all ranks.
        rank: this one.
    """

    def __init__(self, table: Table, whole: Mlp, piece: Mlp, wire: Wire, *, rank: int) -> None:
        self.table, self.wire, self.rank = table, wire, rank
        self._whole = dict(whole.named_parameters())
        self._piece = {name: parameter.data for name, parameter in piece.named_parameters()}
        self.owned = {
            p.name: self._whole[p.name].detach().narrow(p.owned, *self._span(p)).clone() for p in table.parameters
        }

    @torch.no_grad()
    def deal(self, dealt: Deal) -> None:
        """Give every rank its piece."""
        for rank in self._others():
            parts = [take(self.owned[p.name], self._indices(p, dealt, rank)).flatten() for p in self.table.parameters]
            self.wire.put(torch.cat(parts), to=rank, lane=DEALT)
        for owner in range(self.table.size):
            arrived = None if owner == self.rank else self._get(owner, DEALT, self._shapes(owner=owner, rank=self.rank))
            for number, p in enumerate(self.table.parameters):
                part = take(self.owned[p.name], self._indices(p, dealt, owner)) if arrived is None else arrived[number]
                self._place(p, owner).copy_(part)
        self.wire.drain()

    @torch.no_grad()
    def give_back(self, dealt: Deal, *, lane: str) -> None:
        """Put every rank's piece, as it is, where its owners have it."""
        for owner in self._others():
            parts = [self._place(p, owner).flatten() for p in self.table.parameters]
            self.wire.put(torch.cat(parts), to=owner, lane=lane)
        for rank in range(self.table.size):
            arrived = None if rank == self.rank else self._get(rank, lane, self._shapes(owner=self.rank, rank=rank))
            for number, p in enumerate(self.table.parameters):
                part = self._place(p, rank) if arrived is None else arrived[number]
                put(self.owned[p.name], self._indices(p, dealt, rank), part)
        self.wire.drain()

    @torch.no_grad()
    def show_whole(self) -> None:
        """Fill in the whole module's parameters from their owners."""
        mine = torch.cat([self.owned[p.name].flatten() for p in self.table.parameters])
        for rank in self._others():
            self.wire.put(mine, to=rank, lane=WHOLE)
        for p in self.table.parameters:
            self._whole[p.name].data = torch.empty(p.shape)
        for owner in range(self.table.size):
            shapes = [self.table.own_shape(p, owner) for p in self.table.parameters]
            arrived = None if owner == self.rank else self._get(owner, WHOLE, shapes)
            for number, p in enumerate(self.table.parameters):
                start, stop = self.table.own_range(p, owner)
                part = self.owned[p.name] if arrived is None else arrived[number]
                self._whole[p.name].narrow(p.owned, start, stop - start).copy_(part)
        self.wire.drain()

    def give_up_whole(self) -> None:
        """Free the memory of the whole module's parameters."""
        for parameter in self._whole.values():
            parameter.data = torch.empty(0)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.table.size) if rank != self.rank]

    def _span(self, p: Parameter) -> tuple[int, int]:
        start, stop = self.table.own_range(p, self.rank)
        return start, stop - start

    def _indices(self, p: Parameter, dealt: Deal, rank: int) -> tuple[Tensor, ...]:
        return self.table.indices(p, dealt, owner=self.rank, rank=rank)

    def _shapes(self, *, owner: int, rank: int) -> list[tuple[int, ...]]:
        return [self.table.part_shape(p, owner=owner, rank=rank) for p in self.table.parameters]

    def _place(self, p: Parameter, owner: int) -> Tensor:
        """Return the entries of this rank's piece that `owner` has; they share its memory."""
        lengths = [self.table.part_shape(p, owner=each, rank=self.rank)[p.owned] for each in range(owner + 1)]
        return self._piece[p.name].narrow(p.owned, sum(lengths[:-1]), lengths[-1])

    def _get(self, source: int, lane: str, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return what came from a rank, in these shapes."""
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = self.wire.get((sum(sizes),), source=source, lane=lane)
        return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
