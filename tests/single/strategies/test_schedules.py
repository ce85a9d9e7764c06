from __future__ import annotations

from collections import Counter

import pytest

from hvfreeze.strategies.schedules import Operation, batches_begun, tick_schedule

LINES = [(p, ranks, batches) for p in (1, 2, 3, 4) for ranks in (p, p + 1) for batches in (0, 1, 2, 7)]


def schedules(places: int, ranks: int, batches: int) -> list[list[Operation]]:
    return [tick_schedule(rank if rank < places else None, places=places, batches=batches) for rank in range(ranks)]


@pytest.mark.parametrize(("places", "ranks", "batches"), LINES)
def test_every_batch_is_forwarded_and_trained_on_once_and_in_order(places: int, ranks: int, batches: int) -> None:
    for rank, operations in enumerate(schedules(places, ranks, batches)):
        for kind in ("forward", "train"):
            expected = list(range(batches)) if kind == "train" or rank < places else []
            assert [op.batch for op in operations if op.kind == kind] == expected


@pytest.mark.parametrize(("places", "ranks", "batches"), LINES)
def test_ranks_that_follow_their_lists_never_wait_for_ever(places: int, ranks: int, batches: int) -> None:
    left = [list(operations) for operations in schedules(places, ranks, batches)]
    done: set[tuple[int, int]] = set()
    in_flight: Counter[int] = Counter()
    while any(left):
        moved = False
        for rank, operations in enumerate(left):
            if not operations:
                continue
            kind, batch = operations[0]
            needs = (rank - 1, batch) if kind == "forward" else (places - 1, batch)
            if needs in done or (kind == "forward" and rank == 0):
                operations.pop(0)
                moved = True
                if kind == "forward":
                    done.add((rank, batch))
                in_flight[rank] += 1 if kind == "forward" else -1
                assert rank >= places or in_flight[rank] <= places - rank
        assert moved, "a deadlock"


def test_forwards_and_training_take_turns_once_the_line_is_full() -> None:
    kinds = [op.kind for op in tick_schedule(0, places=3, batches=6)]
    assert kinds == ["forward"] * 2 + ["forward", "train"] * 4 + ["train"] * 2


@pytest.mark.parametrize("trained", range(8))
def test_what_has_entered_the_line_is_what_the_first_rank_has_forwarded(trained: int) -> None:
    operations = tick_schedule(0, places=3, batches=7)
    until = [i for i, op in enumerate(operations) if op.kind == "train"][:trained]
    done = operations[: until[-1] + 1] if until else []
    assert batches_begun(trained, places=3, batches=7) == sum(op.kind == "forward" for op in done)
