"""What ranks settle beside training, with ranks that are threads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from hvfreeze.comm import agreement
from hvfreeze.comm.world import World
from hvfreeze.errors import RefusedError
from tests.single.ranks_in_threads import on_ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_rank_with_less_to_do_meets_the_others_between_their_steps(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "ROUND_SECONDS", 0.0)

    def work(world: World) -> tuple[list[int], list[int]]:
        done: list[int] = []
        met: list[int] = []
        gather = world.allgather_object

        def counted(value: Any, *, name: str) -> list[Any]:
            met.append(len(done))
            return gather(value, name=name)

        def steps() -> Iterator[None]:
            for step in range(4 * (world.size - 1 - world.rank)):
                done.append(step)
                yield

        monkeypatch.setattr(world, "allgather_object", counted)
        agreement.synchronize_in_rounds(world, steps(), name="test")
        return done, met

    most = 4 * (size - 1)
    for rank, (done, met) in enumerate(on_ranks(size, work)):
        own = 4 * (size - 1 - rank)
        assert done == [*range(own)]
        assert met == [min(step, own) for step in range(1, most + 1)] + [own]


def test_ranks_do_not_meet_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "ROUND_SECONDS", math.inf)
    names: list[str] = []

    class Counted(World):
        def allgather_object(self, value: Any, *, name: str) -> list[Any]:
            names.append(name)
            return [value]

    agreement.synchronize_in_rounds(Counted(), range(100), name="test")
    assert names == ["verdict.rounds.test"]


def test_an_error_between_two_meetings_is_raised_on_all_ranks() -> None:
    def work(world: World) -> None:
        def steps() -> Iterator[None]:
            yield
            if world.rank == 1:
                raise RefusedError("the disk is full")

        with pytest.raises(RefusedError, match=r"^rank 1: the disk is full") as refused:
            agreement.synchronize_in_rounds(world, steps(), name="test")
        assert refused.value.everywhere

    on_ranks(2, work)
