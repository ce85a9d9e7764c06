"""What ranks settle among themselves before and beside training: failures, equal starts, equal parameters, threads."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from hvfreeze.errors import HvfreezeError, UsageError
from hvfreeze.ranks.world import World

T = TypeVar("T")


def sharing_ranks(world: World) -> list[tuple[str, int, int]]:
    """Return for every rank its host, the cores it may run on, and how many ranks may run on one of these.

    Collective: every rank of `world` must call this.
    """
    gathered = world.allgather_object((socket.gethostname(), os.sched_getaffinity(0)), name="affinity")
    return [
        (host, len(cores), sum(1 for other, theirs in gathered if other == host and theirs & cores))
        for host, cores in gathered
    ]


def threads_per_rank(world: World) -> int:
    """Return how many torch threads this rank should use: its share of the cores that it may run on.

    Collective: every rank of `world` must call this.
    """
    _, cores, ranks = sharing_ranks(world)[world.rank]
    return max(1, cores // ranks)


def crowding(world: World) -> list[str]:
    """Return what the user should know where ranks outnumber the cores of their host.

    Collective: every rank of `world` must call this.
    """
    places = sharing_ranks(world)
    crowded = {host: f"{ranks} ranks for {cores} cores" for host, cores, ranks in places if ranks > cores}
    return [f"{host} has {what}: they take turns, and wait without occupying a core" for host, what in crowded.items()]


def together(world: World, work: Callable[[], T], *, name: str) -> T:
    """Run `work` on every rank; where it fails on one, it fails on all, with the first failing rank's message.

    `work` may hold no collective. Collective: every rank of `world` must call this.
    """
    error: HvfreezeError | None = None
    result: T | None = None
    try:
        result = work()
    except HvfreezeError as mine:
        error = mine
    verdicts = world.allgather_object((type(error), str(error)) if error else None, name=f"together.{name}")
    for rank, verdict in enumerate(verdicts):
        if verdict is not None:
            kind, message = verdict
            common = all(v == verdict for v in verdicts)
            failure = kind(message if common else f"rank {rank}: {message}")
            failure.everywhere = True
            raise failure from error
    return result  # type: ignore[return-value]  # no verdict: work returned


def broadcast_model(model: nn.Module, world: World) -> None:
    """Make all parameters and buffers equal to rank 0's.

    Collective: every rank of `world` must call this, before the optimizer's first step.
    """
    for name, tensor in model.state_dict().items():
        whole = tensor.contiguous()
        world.broadcast_(whole, name=f"initial.{name}")
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


def threads_of_environment() -> int | None:
    """Return OMP_NUM_THREADS as a number, None where it is not set or is no positive whole number."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else None


def check_equal(world: World, what: str, mine: dict[str, Any], *, apart: Sequence[str] = ()) -> None:
    """Refuse to go on when ranks were started differently, leaves named in `apart` apart.

    Collective: every rank of `world` must call this.

    Raises:
        UsageError: names the first rank that differs from rank 0, and in what.
    """
    gathered = world.allgather_object(flatten(mine, apart=apart), name=f"equal.{what}")
    for rank, theirs in enumerate(gathered):
        for key in sorted(set(gathered[0]) | set(theirs)):
            if theirs.get(key) != gathered[0].get(key):
                error = UsageError(
                    f"ranks were started with different {what}: {key} is {gathered[0].get(key)!r} on rank 0 "
                    f"and {theirs.get(key)!r} on rank {rank}; start all ranks with one command"
                )
                error.everywhere = True
                raise error


def flatten(tree: dict[str, Any], *, apart: Sequence[str]) -> dict[str, Any]:
    """Return the leaves of a tree of dicts by dotted name, without those named in `apart`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves.update({f"{key}.{inner}": leaf for inner, leaf in flatten(value, apart=apart).items()})
        elif key not in apart:
            leaves[key] = value
    return leaves
