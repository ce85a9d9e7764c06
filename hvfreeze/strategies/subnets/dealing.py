"""The distribution of an MLP's neurons: their owners, their random assignment to ranks per round, and the exchange.

Every rank owns a range of each hidden layer's neurons, with their rows of the layer's matrix, their BatchNorm scale and
shift and, for the last hidden layer, their columns of the head's matrix. In a round the neurons of each layer are dealt
to all ranks without replacement. Rank r trains the network of its neurons alone, which of a matrix between two hidden
layers has one of n^2 equal blocks. All ranks draw the same random numbers, so no list of neurons is sent. Nothing is
summed on the way from owners to trainers and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hvfreeze.comm.point_to_point import Wire
from hvfreeze.model.mlp import Mlp

DEALING = 0x646561
"""Separates these random draws from others with the same seed: "dea" in ASCII."""
Range = tuple[int, int]
Deal = tuple[tuple[Tensor, ...], ...]
"""A round's neurons: `[layer][rank]` are the rank's, (k,) int64 ascending; together they are a permutation."""


def range_of(width: int, *, rank: int, size: int) -> Range:
    """Return the neurons lo..hi-1 of a layer that a rank owns; of a remainder, the first ranks get one each."""
    least, more = divmod(width, size)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


def deal(widths: Sequence[int], *, size: int, seed: int, number: int) -> Deal:
    """Return the deal of round `number` for hidden layers with these widths and `size` ranks.

    Each owner shuffles its neurons, and they are dealt in turn, owner after owner. So the number of neurons that a rank
    gets from an owner is the same in every round, and equal for all ranks up to one.
    """
    hands = []
    for layer, width in enumerate(widths):
        generator = np.random.default_rng([DEALING, seed, number, layer])
        ranges = [range_of(width, rank=owner, size=size) for owner in range(size)]
        shuffled = np.concatenate([generator.permutation(np.arange(*own)) for own in ranges])
        hands.append(tuple(torch.from_numpy(np.sort(shuffled[rank::size])) for rank in range(size)))
    return tuple(hands)


@dataclass(frozen=True)
class Parameter:
    """The neurons that the dimensions of a parameter stand for."""

    name: str
    """Name of the parameter in the Mlp."""
    shape: tuple[int, ...]
    layers: tuple[int | None, ...]
    """For each dimension the hidden layer, from 0, with one entry per neuron; None if it is not divided."""
    owned: int
    """The dimension by which the parameter is divided among its owners."""

    @property
    def layer(self) -> int:
        """The hidden layer whose owners hold this parameter."""
        layer = self.layers[self.owned]
        assert layer is not None
        return layer


def parameters_of(mlp: Mlp) -> list[Parameter]:
    """Return the parameters of an Mlp in its own order."""
    found = []
    for name, tensor in mlp.named_parameters():
        place = name.split(".")[0]
        if place == "head":
            layers: tuple[int | None, ...] = (None, len(mlp.widths) - 1)
            found.append(Parameter(name, tuple(tensor.shape), layers, owned=1))
            continue
        layer = int(place.removeprefix("hidden")) - 1
        layers = (layer, layer - 1 if layer else None)[: tensor.dim()]
        found.append(Parameter(name, tuple(tensor.shape), layers, owned=0))
    return found


@dataclass(frozen=True)
class Table:
    """The owners of the parameters of an Mlp, and the pieces of a round.

    A piece has the entries that a rank trains in a round: all of undivided dimensions, and the rank's neurons of the
    others in ascending order. So the entries of owners 0, 1, ... follow each other along the owned dimension.
    """

    widths: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    size: int

    @classmethod
    def of(cls, mlp: Mlp, *, size: int) -> Table:
        """Return the table of an Mlp on `size` ranks."""
        return cls(mlp.widths, tuple(parameters_of(mlp)), size)

    def hand_sizes(self, rank: int) -> tuple[int, ...]:
        """Return the number of neurons of each hidden layer that a rank gets in every round."""
        return tuple(len(range(rank, width, self.size)) for width in self.widths)

    def own_range(self, parameter: Parameter, owner: int) -> Range:
        """Return the entries of the owned dimension that `owner` has."""
        return range_of(self.widths[parameter.layer], rank=owner, size=self.size)

    def own_shape(self, parameter: Parameter, owner: int) -> tuple[int, ...]:
        """Return the shape of `owner`'s part of a parameter."""
        start, stop = self.own_range(parameter, owner)
        return (*parameter.shape[: parameter.owned], stop - start, *parameter.shape[parameter.owned + 1 :])

    def own_part(self, parameter: Parameter, whole: Tensor, owner: int) -> Tensor:
        """Return `owner`'s entries of a whole parameter; they share its memory."""
        start, stop = self.own_range(parameter, owner)
        return whole.narrow(parameter.owned, start, stop - start)

    def indices(self, parameter: Parameter, dealt: Deal, *, owner: int, rank: int) -> tuple[Tensor, ...]:
        """Return for each dimension the indices, ascending, of `owner`'s entries that `rank` trains in this deal."""
        found = []
        for dimension, layer in enumerate(parameter.layers):
            if layer is None:
                found.append(torch.arange(parameter.shape[dimension]))
                continue
            hand = dealt[layer][rank]
            if dimension == parameter.owned:
                start, stop = self.own_range(parameter, owner)
                hand = hand[(hand >= start) & (hand < stop)] - start
            found.append(hand)
        return tuple(found)

    def part_shape(self, parameter: Parameter, *, owner: int, rank: int) -> tuple[int, ...]:
        """Return the shape of `owner`'s part of rank's piece, the same in every round."""
        shape = list(parameter.shape)
        for dimension, layer in enumerate(parameter.layers):
            if layer is not None:
                owners = range(self.size) if dimension != parameter.owned else [owner]
                shape[dimension] = sum(self._shared(layer, owner=each, rank=rank) for each in owners)
        return tuple(shape)

    def message_bytes(self, *, owner: int, rank: int) -> int:
        """Return the bytes that `owner` sends to `rank` in a round, and gets back at its end."""
        return 4 * sum(math.prod(self.part_shape(p, owner=owner, rank=rank)) for p in self.parameters)

    def wire_bytes(self) -> int:
        """Return the bytes that all ranks send to deal a round; as many come back."""
        pairs = [(owner, rank) for owner in range(self.size) for rank in range(self.size) if owner != rank]
        return sum(self.message_bytes(owner=owner, rank=rank) for owner, rank in pairs)

    def touched(self) -> dict[str, float]:
        """Return for each parameter the share of its entries that are trained in a round."""
        held = {
            p.name: sum(
                math.prod(self.part_shape(p, owner=owner, rank=rank))
                for owner in range(self.size)
                for rank in range(self.size)
            )
            for p in self.parameters
        }
        return {p.name: held[p.name] / math.prod(p.shape) for p in self.parameters}

    def _shared(self, layer: int, *, owner: int, rank: int) -> int:
        """Return the number of the owner's neurons of a layer that the rank gets."""
        start, stop = range_of(self.widths[layer], rank=owner, size=self.size)
        # The rank gets the places in start..stop-1 of the shuffled neurons that equal `rank` modulo `size`.
        return len(range(start + (rank - start) % self.size, stop, self.size))


def take(tensor: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Return the entries in the product of `indices`, one index per dimension; a copy."""
    for dimension, chosen in enumerate(indices):
        tensor = tensor.index_select(dimension, chosen)
    return tensor


def put(tensor: Tensor, indices: Sequence[Tensor], entries: Tensor) -> None:
    """Write the entries that `take` would return."""
    tensor[np.ix_(*[chosen.numpy() for chosen in indices])] = entries


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the entries of tensors, concatenated."""
    return torch.cat([tensor.flatten() for tensor in tensors])


DEALT, RETURNED, SEEN, WHOLE = "dealt", "returned", "evaluation.returned", "evaluation.whole"
LANES = (DEALT, RETURNED, SEEN, WHOLE)
"""Lanes: from owners to trainers, back at a round's end, back inside a round for a view, and to all ranks for a
view."""


class Exchange:
    """Holds this rank's entries and exchanges them; every method except `free_whole` is a collective.

    Args:
        table: the owners and pieces.
        whole: the module whose parameters are divided; they exist while the whole model is needed.
        piece: the network of this rank's neurons, whose entries change with every deal.
        wire: lanes between all ranks.
        rank: this rank.
    """

    def __init__(self, table: Table, whole: Mlp, piece: Mlp, wire: Wire, *, rank: int) -> None:
        self.table, self.wire, self.rank = table, wire, rank
        self._whole = dict(whole.named_parameters())
        self._piece = {name: parameter.data for name, parameter in piece.named_parameters()}
        self.owned = {p.name: table.own_part(p, self._whole[p.name].detach(), rank).clone() for p in table.parameters}

    @torch.no_grad()
    def deal(self, dealt: Deal) -> None:
        """Send every rank its piece."""
        table = self.table

        def give(rank: int) -> Tensor:
            return flat(take(self.owned[p.name], self._indices(p, dealt, rank)) for p in table.parameters)

        dealt_parts = self._swap(DEALT, give, lambda p, owner: table.part_shape(p, owner=owner, rank=self.rank))
        for p, owner, part in dealt_parts:
            self._place(p, owner).copy_(part)

    @torch.no_grad()
    def give_back(self, dealt: Deal, *, lane: str) -> None:
        """Send every rank's piece, as it is, to its owners."""
        table = self.table

        def give(owner: int) -> Tensor:
            return flat(self._place(p, owner) for p in table.parameters)

        returned = self._swap(lane, give, lambda p, rank: table.part_shape(p, owner=self.rank, rank=rank))
        for p, rank, part in returned:
            put(self.owned[p.name], self._indices(p, dealt, rank), part)

    @torch.no_grad()
    def assemble_whole(self) -> None:
        """Fill in the whole module's parameters from their owners."""
        local = flat(self.owned[p.name] for p in self.table.parameters)
        for p in self.table.parameters:
            self._whole[p.name].data = torch.empty(p.shape)
        for p, owner, part in self._swap(WHOLE, lambda _: local, self.table.own_shape):
            self.table.own_part(p, self._whole[p.name], owner).copy_(part)

    def free_whole(self) -> None:
        """Free the memory of the whole module's parameters."""
        for parameter in self._whole.values():
            parameter.data = torch.empty(0)

    def _indices(self, p: Parameter, dealt: Deal, rank: int) -> tuple[Tensor, ...]:
        return self.table.indices(p, dealt, owner=self.rank, rank=rank)

    def _place(self, p: Parameter, owner: int) -> Tensor:
        """Return `owner`'s entries of this rank's piece; they share its memory."""
        lengths = [self.table.part_shape(p, owner=each, rank=self.rank)[p.owned] for each in range(owner + 1)]
        return self._piece[p.name].narrow(p.owned, sum(lengths[:-1]), lengths[-1])

    def _swap(
        self, lane: str, give: Callable[[int], Tensor], shape: Callable[[Parameter, int], tuple[int, ...]]
    ) -> Iterator[tuple[Parameter, int, Tensor]]:
        """Send every rank the entries that `give` returns for it; yield (parameter, rank, its entries for this one).

        The entries of a rank are concatenated; `shape` returns the shape of each parameter's part.
        """
        ranks = range(self.table.size)
        for rank in ranks:
            if rank != self.rank:
                self.wire.put(give(rank), to=rank, lane=lane)
        for rank in ranks:
            shapes = [shape(p, rank) for p in self.table.parameters]
            sizes = list(map(math.prod, shapes))
            came = give(rank) if rank == self.rank else self.wire.get((sum(sizes),), source=rank, lane=lane)
            for p, part, formed in zip(self.table.parameters, came.split(sizes), shapes, strict=True):
                yield p, rank, part.view(formed)
        self.wire.drain()
