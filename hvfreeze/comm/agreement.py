"""What ranks settle among themselves before and beside training: failures, and equal starts."""

from __future__ import annotations

import math
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
"""Of small tensors that travel together: each message waits for all ranks."""
NOTHING = torch.empty(0, dtype=torch.uint8)


def raise_on_all_ranks(world: World, work: Callable[[], T], *, name: str) -> T:
    """Run `work` on every rank; where it fails on one, it fails on all, with the first failing rank's message.

    `work` may hold no collective. Collective.
    """
    results: list[T] = []

    def keep() -> None:
        results.append(work())

    results_of_all_ranks(world, keep, name=name)
    return results[0]


def results_of_all_ranks(world: World, work: Callable[[], T], *, name: str) -> list[T]:
    """Do as `raise_on_all_ranks`, and return every rank's result, in rank order; for small ones. Collective."""
    error: HvfreezeError | None = None
    result: T | None = None
    try:
        result = work()
    except HvfreezeError as mine:
        error = mine
    said = (type(error), str(error)) if error else None
    gathered = world.allgather_object((said, result), name=f"verdict.{name}")
    verdicts = [verdict for verdict, _ in gathered]
    for rank, verdict in enumerate(verdicts):
        if verdict is not None:
            kind, message = verdict
            common = all(v == verdict for v in verdicts)
            raise kind(message if common else f"rank {rank}: {message}").on_all_ranks() from error
    return [theirs for _, theirs in gathered]  # type: ignore[misc]  # no verdict: work returned


ROUND_SECONDS = 10.0


def go_in_rounds(world: World, steps: Iterable[object], *, name: str) -> None:
    """Go through `steps`, of which ranks may have different numbers, and meet the others every few seconds. Collective.

    If they met at the end only, ranks with fewer would take one with many more for stopped.
    """
    left = iter(steps)
    while any(world.allgather_object(_go_for_a_round(left), name=f"rounds.{name}")):
        pass


def _go_for_a_round(steps: Iterator[object]) -> bool:
    """Return whether steps may be left."""
    end = time.monotonic() + ROUND_SECONDS
    return any(time.monotonic() >= end for _ in steps)


def look_once(world: World, look: Callable[[], tuple[T, str, U]], *, place: str) -> tuple[T, U]:
    """Look at the data on one rank of each node; return rank 0's find, and what is particular to this rank's node.

    The work is one look a node, however many ranks it has, and one broadcast. Collective.

    Args:
        world: all ranks.
        look: returns what is sent, a digest of it that must be equal everywhere, and what is particular to a node.
        place: ranks of a node look at the same where this is equal.

    Raises:
        UsageError: places differ; names the first that differs from rank 0's.
    """
    here = (socket.gethostname(), place)
    places = world.allgather_object(here, name="look.data.places")
    # Also where two nodes have one name.
    looks = world.local_rank == 0 or places.index(here) == world.rank
    seen = raise_on_all_ranks(world, lambda: look() if looks else None, name="look.data")
    facts = world.allgather_object(None if seen is None else seen[1:], name="look.data.digests")
    for rank, found in enumerate(facts):
        if found is not None and found[0] != facts[0][0]:  # type: ignore[index]  # rank 0 looks
            raise UsageError(
                f"ranks were started with different data: {places[rank][1]} on rank {rank} ({places[rank][0]}) "
                f"holds other files than {places[0][1]} on rank 0 ({places[0][0]}); bring the same to all of them"
            ).on_all_ranks()
    sent = world.broadcast_object(None if seen is None else seen[0], name="look.data.seen")
    own = next(found[1] for found, at in zip(facts, places, strict=True) if found is not None and at == here)
    return sent, own  # type: ignore[return-value]  # rank 0 looks


def check_equal(
    world: World,
    what: str,
    mine: dict[str, Any],
    *,
    apart: Sequence[str] = (),
    remedy: str = "start all ranks with one command",
) -> None:
    """Refuse to go on when ranks were started differently, leaves named in `apart` apart; `remedy` helps. Collective.

    Raises:
        UsageError: names the first rank that differs from rank 0, and in what.
    """
    gathered = world.allgather_object(flatten(mine, apart=apart), name=f"equal.{what}")
    for rank, theirs in enumerate(gathered):
        for key in sorted(set(gathered[0]) | set(theirs)):
            if theirs.get(key) != gathered[0].get(key):
                raise UsageError(
                    f"ranks were started with different {what}: {key} is {gathered[0].get(key)!r} on rank 0 "
                    f"and {theirs.get(key)!r} on rank {rank}; {remedy}"
                ).on_all_ranks()


def flatten(tree: dict[str, Any], *, apart: Sequence[str]) -> dict[str, Any]:
    """Return the leaves of a tree of dicts by dotted name, without those named in `apart`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves.update({f"{key}.{inner}": leaf for inner, leaf in flatten(value, apart=apart).items()})
        elif key not in apart:
            leaves[key] = value
    return leaves


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor lies in memory.

    It travels as it lies, and is put together with the same strides: a block that is given the same numbers in another
    order of the dimensions may compute other bits.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Dense: the elements fill their memory without gaps."""
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> TensorLayout:
        """Return a tensor's layout, contiguous where it is not dense."""
        # What is dense keeps its strides in a new tensor, what is not does not.
        strides = torch.empty_like(x, device="meta").stride()
        return cls(tuple(x.shape), tuple(strides), x.dtype)

    @property
    def num_elements(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return self.num_elements * self.dtype.itemsize

    def flat(self, x: Tensor) -> Tensor:
        """Return the memory of `x`, a tensor of this layout, as a vector; shared with `x` where it lies right."""
        if x.stride() != self.strides:
            x = torch.empty_strided(self.shape, self.strides, dtype=self.dtype).copy_(x)
        return x.as_strided((self.num_elements,), (1,))

    def formed(self, memory: Tensor) -> Tensor:
        """Undo `flat`, sharing the vector's memory."""
        return memory.as_strided(self.shape, self.strides)


def gather_tensors(world: World, named: Sequence[tuple[str, Tensor]], *, name: str) -> dict[str, Tensor]:
    """Return on rank 0 the tensors of all ranks together, by their names; on the others an empty dict. Collective.

    Rank 0's own are not copied, and what the others send comes a few tensors at a time and stays where it has come, so
    that rank 0 needs no memory but the result's.
    """
    own = {key: tensor.detach() for key, tensor in named}
    found = own if world.rank == 0 else {}
    mine = [] if world.rank == 0 else [(key, TensorLayout.of(tensor)) for key, tensor in own.items()]
    packs = list(packs_of(mine, lambda one: one[1].num_bytes, PACK_BYTES))
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
    """Yield items in their order, as many together as the limit holds, one at least."""
    pack: list[T] = []
    for item in items:
        if pack and sum(map(size_of, pack)) + size_of(item) > limit_bytes:
            yield pack
            pack = []
        pack.append(item)
    if pack:
        yield pack
