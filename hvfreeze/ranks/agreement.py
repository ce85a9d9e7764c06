"""What ranks settle among themselves before and beside training: failures, and equal starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvfreeze.errors import HvfreezeError, UsageError
from hvfreeze.ranks.world import World

T = TypeVar("T")


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
