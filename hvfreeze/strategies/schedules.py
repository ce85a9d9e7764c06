"""The operations of each rank in their order, as pure functions: checked without ranks, and then only followed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Operation(NamedTuple):
    """One thing that a rank does with one batch, or micro-batch."""

    kind: str
    """`forward` or `backward` through its segment, or `train`: its heads, on the output of the last segment."""
    batch: int


def tick_schedule(place: int | None, *, places: int, batches: int) -> list[Operation]:
    """Return a rank's operations for `batches` batches that stream through a line of `places` segments.

    One forward, one training step, by turns: at its tick t the rank at `place` runs its segment for batch t and trains
    on batch t - (places - 1 - place). So the line is filled once, by the first places - 1 - place forwards, and at most
    places - place batches are between a rank's forward and its training. A rank without a place, None, only trains.

    Source: McNeela, Patel, Gupta: "Efficient Distributed Transfer Learning Using Pipelined Model Parallelism" (1F-1B).
    """
    if place is None:
        return [Operation("train", batch) for batch in range(batches)]
    ahead = places - 1 - place
    operations = []
    for tick in range(batches + ahead):
        if tick < batches:
            operations.append(Operation("forward", tick))
        if tick >= ahead:
            operations.append(Operation("train", tick - ahead))
    return operations


def batches_begun(trained: int, *, places: int, batches: int) -> int:
    """Return how many batches have entered a line when every rank has trained on `trained` of them."""
    return min(batches, trained + places - 1) if trained else 0


def fill_drain(place: int, *, places: int, parts: Sequence[int]) -> list[Operation]:
    """Return the operations of the rank at `place` for the micro-batches `parts` of one step: all forwards first.

    Source: Huang et al., "GPipe", 2019, but with backwards in ascending order, so that sums of gradients have one order
    in all schedules; HyPar-Flow's is of this kind.
    """
    return [Operation(kind, part) for kind in ("forward", "backward") for part in parts]


def one_forward_one_backward(place: int, *, places: int, parts: Sequence[int]) -> list[Operation]:
    """Return the same operations, each backward as soon as it can be: at most places - place micro-batches are kept.

    Source: Narayanan et al., "PipeDream", 2019, with a flush at each step's end, so that no weights are stale.
    """
    ahead = min(places - 1 - place, len(parts))
    operations = [Operation("forward", part) for part in parts[:ahead]]
    for forward, backward in zip(parts[ahead:], parts):
        operations += [Operation("forward", forward), Operation("backward", backward)]
    return [*operations, *[Operation("backward", part) for part in parts[len(parts) - ahead :]]]


def stale_batch(step: int, *, delay: int, since: int) -> int | None:
    """Return the batch whose gradient a module of a ring uses in step `step`, None where there is none yet.

    Before step `since` it is the step's own; from then on the one of `delay` steps before. None from before `since` is
    used again.

    Source: Huo et al., "Decoupled Parallel Backpropagation with Convergence Guarantee", ICML 2018, arXiv 1804.10574.
    """
    if step < since:
        return step
    return step - delay if step - delay >= since else None


def ring_period(costs: Sequence[float]) -> float:
    """Return how long a step of a ring takes whose modules have these forward times; backward passes take twice those.

    Rank 0 computes the first module forward, that one's old batch backward, then the last module in both directions.
    The others compute forward when the batch has come, then backward. An update ends the step on all ranks.
    """
    first, *inner, last = costs
    came, ends = first, []
    for cost in inner:
        came += cost
        ends.append(came + 2 * cost)
    return max(max(came, 3 * first) + 3 * last, *ends) if inner else 3 * (first + last)


SCHEDULES: dict[str, Callable[..., list[Operation]]] = {"fill-drain": fill_drain, "1f1b": one_forward_one_backward}
"""By the name that --pipeline gives them."""
