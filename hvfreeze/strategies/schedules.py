"""Pipeline schedules: each rank's operations in order, as pure functions that can be tested without ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Operation(NamedTuple):
    """One operation of a rank on one batch or micro-batch."""

    kind: str
    """`forward` or `backward` through its segment, or `train`: its heads on the output of the last segment."""
    batch: int


def tick_schedule(place: int | None, *, places: int, batches: int) -> list[Operation]:
    """Return a rank's operations for `batches` batches that stream through a pipeline of `places` segments (1F-1B).

    One forward pass and one training step alternate. At its tick t, the rank at `place` runs its segment for batch t
    and trains on batch t - (places - 1 - place). The pipeline is filled once by the first places - 1 - place forward
    passes, and at most places - place batches are between a rank's forward pass and its training. A rank with place
    None only trains.

    Source: McNeela, Patel, Gupta: "Efficient Distributed Transfer Learning Using Pipelined Model Parallelism".
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
    """Return how many batches have entered a pipeline after every rank has trained on `trained` of them."""
    return min(batches, trained + places - 1) if trained else 0


def fill_drain(place: int, *, places: int, parts: Sequence[int]) -> list[Operation]:
    """Return the operations of the rank at `place` for the micro-batches `parts` of a step: all forward passes first.

    Source: Huang et al., "GPipe", 2019, but with backward passes in ascending order, so that gradients are summed in
    the same order in all schedules; HyPar-Flow's schedule is of this kind.
    """
    return [Operation(kind, part) for kind in ("forward", "backward") for part in parts]


def one_forward_one_backward(place: int, *, places: int, parts: Sequence[int]) -> list[Operation]:
    """Return the same operations with early backward passes: keeps at most places - place micro-batches.

    Source: Narayanan et al., "PipeDream", 2019, with a flush at the end of each step, so that no weights are stale.
    """
    ahead = min(places - 1 - place, len(parts))
    operations = [Operation("forward", part) for part in parts[:ahead]]
    for forward, backward in zip(parts[ahead:], parts):
        operations += [Operation("forward", forward), Operation("backward", backward)]
    return [*operations, *[Operation("backward", part) for part in parts[len(parts) - ahead :]]]


def stale_batch(step: int, *, delay: int, since: int) -> int | None:
    """Return the batch whose gradient a module of a ring uses in step `step`, None if there is none yet.

    Before step `since` it is the batch of that step, afterwards that of `delay` steps before. Batches from before
    `since` are not used again.

    Source: Huo et al., "Decoupled Parallel Backpropagation with Convergence Guarantee", ICML 2018, arXiv 1804.10574.
    """
    if step < since:
        return step
    return step - delay if step - delay >= since else None


def ring_period(costs: Sequence[float]) -> float:
    """Return the time of a ring's step from the modules' forward times; a backward pass takes twice as long.

    Rank 0 runs the first module forward, its old batch backward, then the last module forward and backward. Other ranks
    run forward when the batch has arrived, then backward. An update ends the step on all ranks.
    """
    first, *inner, last = costs
    came, ends = first, []
    for cost in inner:
        came += cost
        ends.append(came + 2 * cost)
    return max(max(came, 3 * first) + 3 * last, *ends) if inner else 3 * (first + last)


SCHEDULES: dict[str, Callable[..., list[Operation]]] = {"fill-drain": fill_drain, "1f1b": one_forward_one_backward}
"""Schedules by the value of --pipeline."""
