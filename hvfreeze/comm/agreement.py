"""Agreements between ranks outside training: shared failures, equal starts and gathered tensors."""

from __future__ import annotations

import math
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.errors import HvfreezeError, UsageError

T = TypeVar("T")
U = TypeVar("U")

PACK_BYTES = 2**22
"""Bytes of small tensors that are sent as one message, because each message waits for all ranks."""
NOTHING = torch.empty(0, dtype=torch.uint8)


def raise_on_all_ranks(world: World, work: Callable[[], T], *, name: str) -> T:
    """Run `work` on every rank; if it fails on one, raise the first failing rank's error on all. Collective.

    `work` may hold no collective.
    """
    results: list[T] = []
    gather_results(world, lambda: results.append(work()), name=name)
    return results[0]


def gather_results(world: World, work: Callable[[], T], *, name: str) -> list[T]:
    """Return the (small) results of `work` on all ranks, in rank order; fails like `raise_on_all_ranks`. Collective."""
    error: HvfreezeError | None = None
    result: T | None = None
    try:
        result = work()
    except HvfreezeError as local:
        error = local
    said = (type(error), str(error)) if error else None
    verdicts, results = zip(*world.allgather_object((said, result), name=f"verdict.{name}"), strict=True)
    for rank, verdict in enumerate(verdicts):
        if verdict is not None:
            kind, message = verdict
            common = len(set(verdicts)) == 1
            raise kind(message if common else f"rank {rank}: {message}").on_all_ranks() from error
    return list(results)


def gather_objects(world: World, value: T, *, name: str) -> list[T]:
    """Return every rank's `value` on rank 0, in rank order, and [] on other ranks. Collective."""
    if world.size == 1:
        return [value]
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [pickle.loads(part.numpy().data) for part in world.gather_bytes(mine, name=name)]


ROUND_SECONDS = 10.0


def synchronize_in_rounds(world: World, steps: Iterable[object], *, name: str) -> None:
    """Iterate over `steps`, whose number may differ between ranks, and synchronize every few seconds. Collective.

    If ranks met only at the end, the stall watch would take a rank with many steps for a stopped one. `steps` may hold
    no collective. An error of one rank is raised on all, as by `raise_on_all_ranks`.
    """
    left = iter(steps)
    while any(gather_results(world, lambda: _run_round(left), name=f"rounds.{name}")):
        pass


def _run_round(steps: Iterator[object]) -> bool:
    """Iterate over `steps` for `ROUND_SECONDS`; return True if some may be left."""
    end = time.monotonic() + ROUND_SECONDS
    return any(time.monotonic() >= end for _ in steps)


def read_once_per_node(world: World, look: Callable[[], tuple[T, str, U]], *, place: str) -> tuple[T, U]:
    """Read the data on one rank of each node; return rank 0's result and the result of this rank's node.

    The data is read once per node, however many ranks it has, and broadcast once. Collective.

    Args:
        world: all ranks.
        look: returns the object to broadcast, a digest that must be equal on all nodes, and a result for its own node.
        place: the path of the data; ranks of a node with equal places share one reading.

    Raises:
        UsageError: the digests differ; names the first place that differs from rank 0's.
    """
    here = (socket.gethostname(), place)
    places = world.allgather_object(here, name="look.data.places")
    # The first rank of each node, and of each (host name, place): two nodes may have the same host name.
    looks = world.local_rank == 0 or places.index(here) == world.rank
    seen = raise_on_all_ranks(world, lambda: look() if looks else None, name="look.data")
    facts = world.allgather_object(None if seen is None else seen[1:], name="look.data.digests")
    for rank, found in enumerate(facts):
        if found is not None and found[0] != facts[0][0]:  # type: ignore[index]  # rank 0 looks
            raise UsageError(
                f"the ranks have different data: {places[rank][1]} on rank {rank} ({places[rank][0]}) differs from "
                f"{places[0][1]} on rank 0 ({places[0][0]}); copy the same files to all nodes"
            ).on_all_ranks()
    sent = world.broadcast_object(None if seen is None else seen[0], name="look.data.seen")
    own = next(found[1] for found, at in zip(facts, places, strict=True) if found is not None and at == here)
    return sent, own  # type: ignore[return-value]  # rank 0 looks


def check_equal(
    world: World,
    what: str,
    local: dict[str, Any],
    *,
    apart: Sequence[str] = (),
    remedy: str = "start all ranks with the same command",
) -> None:
    """Raise UsageError if `local` differs between ranks. Collective.

    Args:
        world: all ranks.
        what: the noun for messages.
        local: this rank's values, a tree of dicts.
        apart: keys of leaves that may differ, in any part of the tree.
        remedy: the last clause of the message.

    Raises:
        UsageError: names the first rank and key that differ from rank 0.
    """
    gathered = world.allgather_object(flatten(local, apart=apart), name=f"equal.{what}")
    for rank, theirs in enumerate(gathered):
        for key in sorted(set(gathered[0]) | set(theirs)):
            if theirs.get(key) != gathered[0].get(key):
                raise UsageError(
                    f"ranks were started with different {what}: {key} is {gathered[0].get(key)!r} on rank 0 and "
                    f"{theirs.get(key)!r} on rank {rank}; {remedy}"
                ).on_all_ranks()


def flatten(tree: dict[str, Any], *, apart: Sequence[str]) -> dict[str, Any]:
    """Return the leaves of a tree of dicts by dotted name, except those whose own key is in `apart`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves.update({f"{key}.{inner}": leaf for inner, leaf in flatten(value, apart=apart).items()})
        elif key not in apart:
            leaves[key] = value
    return leaves


@dataclass(frozen=True)
class TensorLayout:
    """The memory layout of a tensor: type, shape and strides.

    A tensor is sent in its memory order and received with the same strides, because a block may compute other bits from
    equal numbers in another order of dimensions.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements. The tensor is dense: its elements fill the memory without gaps."""
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> TensorLayout:
        """Return a tensor's layout; the contiguous one if the tensor is not dense."""
        # A new tensor keeps the strides of a dense one, and is contiguous otherwise.
        strides = torch.empty_like(x, device="meta").stride()
        return cls(tuple(x.shape), tuple(strides), x.dtype)

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.num_elements * self.dtype.itemsize

    def flat(self, x: Tensor) -> Tensor:
        """Return `x`, a tensor of this shape, as a vector in memory order; shares its memory if the strides match."""
        if x.stride() != self.strides:
            x = torch.empty_strided(self.shape, self.strides, dtype=self.dtype).copy_(x)
        return x.as_strided((self.num_elements,), (1,))

    def formed(self, memory: Tensor) -> Tensor:
        """Undo `flat`: return the vector as a tensor of this layout that shares its memory."""
        return memory.as_strided(self.shape, self.strides)


def gather_tensors(world: World, named: Sequence[tuple[str, Tensor]], *, name: str) -> dict[str, Tensor]:
    """Return the tensors of all ranks by name on rank 0, and an empty dict on the others. Collective.

    Rank 0 does not copy its own tensors. It receives a few tensors at a time into their final memory, so it needs no
    memory beyond the result.
    """
    own = {key: tensor.detach() for key, tensor in named}
    found = own if world.rank == 0 else {}
    local = [] if world.rank == 0 else [(key, TensorLayout.of(tensor)) for key, tensor in own.items()]
    packs = list(packs_of(local, lambda one: one[1].num_bytes, PACK_BYTES))
    for rank, theirs in enumerate(world.allgather_object(packs, name=f"{name}.layouts")):
        for number, pack in enumerate(theirs):
            given = (
                [layout.flat(own[key]).view(torch.uint8) for key, layout in pack] if rank == world.rank else [NOTHING]
            )
            parts = world.gather_bytes(torch.cat(given), name=f"{name}.{rank}.{number}")
            if world.rank == 0:
                memories = parts[rank].split([layout.num_bytes for _, layout in pack])
                for (key, layout), memory in zip(pack, memories, strict=True):
                    memory = memory if len(pack) == 1 else memory.clone()
                    found[key] = layout.formed(memory.view(layout.dtype))
    return found


def packs_of(items: Iterable[T], size_of: Callable[[T], int], limit_bytes: int) -> Iterator[list[T]]:
    """Yield items in order, in groups of at most `limit_bytes` and at least one item."""
    pack: list[T] = []
    for item in items:
        if pack and sum(map(size_of, pack)) + size_of(item) > limit_bytes:
            yield pack
            pack = []
        pack.append(item)
    if pack:
        yield pack
