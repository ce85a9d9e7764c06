"""When Horovod is made to rest longer between two looks for work, and what starting it anew must not meet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hvfreeze.comm.cycle_time import JOBS_CORES, LONG_CYCLE_MS, lengthen_cycle_on_full_cores
from hvfreeze.comm.horovod_world import HorovodWorld
from hvfreeze.comm.mpi_environment import CYCLE_TIME
from hvfreeze.comm.resources import count_in
from hvfreeze.errors import UsageError


class Made(HorovodWorld):
    """Rank 0 of ranks on hosts of 4 cores that are made up, two on each; the others are as full as this one."""

    def __init__(self, *hosts: str) -> None:
        self.hosts, self.rank = [host for host in hosts for _ in range(2)], 0
        self.anew: list[tuple[str, str]] = []

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        """Gathers this rank's value from every host."""
        if name != "affinity":
            return [value] * len(self.hosts)
        return [(host, *value[1:]) for host in self.hosts]

    def restart(self, variable: str, value: str) -> None:
        """Notes it."""
        self.anew.append((variable, value))


class Horovod:
    """Notes what is asked of it, and what is watched."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """The stall watch's."""
        self.asked.append("waits")
        yield
        self.asked.append("goes on")

    def shutdown(self) -> None:
        """Ends."""
        self.asked.append("shutdown")

    def init(self) -> None:
        """Begins, with what is in the environment by then."""
        self.asked.append(f"init {os.environ.get('HVFREEZE_TOLD')}")


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CYCLE_TIME, JOBS_CORES, "HVFREEZE_TOLD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


LONGER = [(CYCLE_TIME, str(LONG_CYCLE_MS))]


@pytest.mark.parametrize(
    ("hosts", "threads", "of_job", "anew"),
    [
        ("ab", 2, "", LONGER),
        ("ab", 3, "", LONGER),
        ("ab", 1, "", []),  # two cores are left
        ("ab", 1, "2", LONGER),  # of a job that may use but two
        ("ab", 1, "3", []),
        ("ab", 2, "64", LONGER),  # more than there are
        ("ab", 2, "some", LONGER),
        ("a", 2, "", []),  # one node
    ],
)
def test_horovod_rests_longer_where_the_cores_of_several_nodes_are_full(
    monkeypatch: pytest.MonkeyPatch, hosts: str, threads: int, of_job: str, anew: list[tuple[str, str]]
) -> None:
    monkeypatch.setenv(JOBS_CORES, of_job)
    world: Any = Made(*hosts)
    assert len(lengthen_cycle_on_full_cores(world, threads)) == len(anew)
    assert world.anew == anew


def test_a_cycle_time_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CYCLE_TIME, "2")
    world: Any = Made("a", "b")
    assert not lengthen_cycle_on_full_cores(world, 4)
    assert (world.anew, os.environ[CYCLE_TIME]) == ([], "2")


def test_one_node_that_is_full_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for full in ([True, False], [False, False]):
        monkeypatch.setattr(Made, "allgather_object", lambda self, value, *, name, full=full: told(self, value, full))
        world: Any = Made("a", "b")
        assert bool(lengthen_cycle_on_full_cores(world, 1)) == any(full)


def told(world: Made, value: Any, full: list[bool]) -> list[Any]:
    """What ranks tell where nodes are full as given."""
    if isinstance(value[1], set):
        return [(host, value[1]) for host in world.hosts]
    return [(each, False) for each in full]


def test_horovod_is_started_anew_with_the_variable_and_never_beside_a_cycle_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HorovodWorld, "barrier", lambda self, *, name: None)
    world, hvd = object.__new__(HorovodWorld), Horovod()
    world._hvd = hvd
    world.watch = hvd  # type: ignore[assignment]
    world.restart("HVFREEZE_TOLD", "1")
    assert hvd.asked == ["waits", "shutdown", "init 1", "goes on"]
    monkeypatch.setenv(CYCLE_TIME, "3")
    with pytest.raises(UsageError, match=rf"\${CYCLE_TIME} \(3\) is set.*set HVFREEZE_TOLD=1 too"):
        world.restart("HVFREEZE_TOLD", "1")
    assert len(hvd.asked) == 4


def test_cores_of_the_job_are_none_where_nobody_has_said_so() -> None:
    assert count_in(JOBS_CORES) is None
