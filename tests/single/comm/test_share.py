"""Messages about the cores of each rank."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hvfreeze.comm import resources

BOUND = "OMPI_MCA_orte_bound_at_launch"


class Gathering:
    """A world whose ranks all run on hosts and cores that are made up."""

    def __init__(self, *found: tuple[str, set[int], set[int]]) -> None:
        self.found, self.own = found, None  # type: tuple[Any, ...], Any

    def allgather_object(self, found: Any, *, name: str) -> Any:
        """Gathers synthetic values, and remembers the value of this rank."""
        self.own = found
        return list(self.found)


ALL = {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([("a", {0}, ALL), ("a", {1}, ALL), ("b", ALL, ALL)], ["a: mpirun bound its ranks to 2 of 4 cores"]),
        ([("a", {core}, ALL) for core in ALL], []),
        ([("a", {0, 1}, set()), ("a", {0, 1}, set())], []),
        # A launcher that a user has kept to some cores leaves the others alone on purpose.
        ([("a", {0, 1}, {0, 1})], []),
    ],
)
def test_cores_that_mpirun_leaves_idle_are_told_host_by_host(
    ranks: list[tuple[str, set[int], set[int]]], told: list[str]
) -> None:
    world: Any = Gathering(*ranks)
    said = resources.note_bound_cores(world)
    assert [line.partition(";")[0] for line in said] == told
    assert all("--bind-to none" in line for line in said)


def test_only_a_rank_that_was_bound_asks_what_its_launcher_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BOUND, raising=False)
    assert resources.launchers_cores() == set()
    monkeypatch.setenv(BOUND, "1")
    assert resources.launchers_cores() == os.sched_getaffinity(os.getppid())
    monkeypatch.setattr(os, "getppid", lambda: 2**22 + 1)
    assert resources.launchers_cores() == set()
