from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from hvfreeze.strategies.schedules import SCHEDULES, Operation, batches_begun, tick_schedule

LINES = [(p, ranks, batches) for p in (1, 2, 4) for ranks in (p, p + 1) for batches in (0, 1, 7)]


def schedules(places: int, ranks: int, batches: int) -> list[list[Operation]]:
    return [tick_schedule(rank if rank < places else None, places=places, batches=batches) for rank in range(ranks)]


@pytest.mark.parametrize(("places", "ranks", "batches"), LINES)
def test_batches_are_trained_on_once_in_order_and_no_rank_waits_for_ever(places: int, ranks: int, batches: int) -> None:
    for rank, operations in enumerate(schedules(places, ranks, batches)):
        for kind in ("forward", "train"):
            expected = list(range(batches)) if kind == "train" or rank < places else []
            assert [op.batch for op in operations if op.kind == kind] == expected
    follow(schedules(places, ranks, batches), places, lambda rank: places - rank if rank < places else 0)


def follow(schedules: list[list[Operation]], places: int, most: Callable[[int], int]) -> None:
    """Let ranks follow their lists: none waits for ever, and at most `most(rank)` batches are kept."""
    left, done = [list(operations) for operations in schedules], set[tuple[str, int, int]]()
    kept = Counter[int]()
    while any(left):
        ready = [rank for rank in range(len(left)) if left[rank] and has_come(left[rank][0], rank, places, done)]
        assert ready, "a deadlock"
        for rank in ready:
            kind, batch = left[rank].pop(0)
            done.add((kind, rank, batch))
            kept[rank] += 1 if kind == "forward" else -1
            assert kept[rank] <= most(rank)


def has_come(operation: Operation, rank: int, places: int, done: set[tuple[str, int, int]]) -> bool:
    """Return whether an operation's input is there; what follows a rank's last forward pass needs the last place's."""
    kind, batch = operation
    if kind == "forward":
        return rank == 0 or ("forward", rank - 1, batch) in done
    if kind == "backward" and rank < places - 1:
        return ("backward", rank + 1, batch) in done
    return ("forward", places - 1, batch) in done


def test_forwards_and_training_take_turns_once_the_line_is_full() -> None:
    kinds = [op.kind for op in tick_schedule(0, places=3, batches=6)]
    assert kinds == ["forward"] * 2 + ["forward", "train"] * 4 + ["train"] * 2


@pytest.mark.parametrize("trained", range(8))
def test_what_has_entered_the_line_is_what_the_first_rank_has_forwarded(trained: int) -> None:
    operations = tick_schedule(0, places=3, batches=7)
    until = [i for i, op in enumerate(operations) if op.kind == "train"][:trained]
    done = operations[: until[-1] + 1] if until else []
    assert batches_begun(trained, places=3, batches=7) == sum(op.kind == "forward" for op in done)


PIPELINES = [(name, places, parts) for name in SCHEDULES for places in (1, 2, 3, 5) for parts in (1, 2, 4, 9)]


def pipeline(name: str, places: int, parts: int) -> list[list[Operation]]:
    return [SCHEDULES[name](place, places=places, parts=range(parts)) for place in range(places)]


@pytest.mark.parametrize(("name", "places", "parts"), PIPELINES)
def test_every_micro_batch_goes_forward_and_back_once_and_in_order(name: str, places: int, parts: int) -> None:
    """Ascending backwards add up gradients in one order, so that schedules give the same bits."""
    for operations in pipeline(name, places, parts):
        for kind in ("forward", "backward"):
            assert [op.batch for op in operations if op.kind == kind] == list(range(parts))


@pytest.mark.parametrize(("name", "places", "parts"), PIPELINES)
def test_every_receive_has_its_send_and_few_micro_batches_are_kept(name: str, places: int, parts: int) -> None:
    most = parts if name == "fill-drain" else places
    follow(pipeline(name, places, parts), places, lambda place: min(parts, most - (name == "1f1b") * place))


def test_one_forward_and_one_backward_take_turns() -> None:
    kinds = [op.kind for op in SCHEDULES["1f1b"](0, places=3, parts=range(4))]
    assert kinds == ["forward"] * 3 + ["backward", "forward"] + ["backward"] * 3
