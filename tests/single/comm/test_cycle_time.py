"""When Horovod is made to rest longer between two looks for work."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hvfreeze.comm.cycle_time import JOBS_CORES, LONG_CYCLE_MS, lengthen_cycle_on_full_cores
from hvfreeze.comm.horovod_world import HorovodWorld
from hvfreeze.comm.mpi_environment import CYCLE_TIME

LONGER = [(CYCLE_TIME, str(LONG_CYCLE_MS))]


class Made(HorovodWorld):
    """Rank 0 of ranks on hosts of 4 cores that are made up, two on each; `full`: whether the last one is, too."""

    def __init__(self, hosts: str, *, full: bool | None) -> None:
        self.hosts, self.rank, self._full = [host for host in hosts for _ in range(2)], 0, full
        self.anew: list[tuple[str, str]] = []

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        """Gathers this rank's value from every host."""
        if name == "affinity":
            return [(host, *value[1:]) for host in self.hosts]
        return [value] * (len(self.hosts) - 1) + [value if self._full is None else (self._full, value[1])]

    def restart(self, variable: str, value: str) -> None:
        """Notes it."""
        self.anew.append((variable, value))


@pytest.mark.parametrize(
    ("hosts", "threads", "of_job", "last", "cycle", "anew"),
    [
        ("ab", 2, "", None, "", LONGER),
        ("ab", 1, "", None, "", []),  # two cores are left
        ("ab", 1, "2", None, "", LONGER),  # of a job that may use but two
        ("a", 2, "", None, "", []),  # one node
        ("ab", 1, "", True, "", LONGER),  # one node that is full decides for all
        ("ab", 2, "", False, "", LONGER),
        ("ab", 4, "", None, "2", []),  # what the user has set stays
    ],
)
def test_horovod_rests_longer_where_the_cores_of_several_nodes_are_full(
    monkeypatch: pytest.MonkeyPatch,
    hosts: str,
    threads: int,
    of_job: str,
    last: bool | None,
    cycle: str,
    anew: list[tuple[str, str]],
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv(JOBS_CORES, of_job)
    monkeypatch.setenv(CYCLE_TIME, cycle)
    if not cycle:
        monkeypatch.delenv(CYCLE_TIME)
    world: Any = Made(hosts, full=last)
    assert len(lengthen_cycle_on_full_cores(world, threads)) == len(anew)
    assert world.anew == anew
