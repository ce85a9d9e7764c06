from __future__ import annotations

import sys
from collections import defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvfreeze.comm.horovod_world import HorovodWorld
from hvfreeze.comm.mpi_environment import CYCLE_TIME
from hvfreeze.comm.point_to_point import LaneCounts, MpiWire, Wire
from hvfreeze.comm.stall_watch import STALL_SECONDS, StallWatch, stall_limit
from hvfreeze.errors import DivergedError, HvfreezeError, StallError, UsageError


class InternalError(Exception):
    pass


@pytest.mark.parametrize("begins", [True, False], ids=["wait", "begin"])
@pytest.mark.parametrize(
    ("said", "kind"), [("Mismatched shapes", DivergedError), ("Horovod has been shut down", StallError)]
)
def test_a_peer_that_is_gone_is_told_in_one_line_when_an_operation_begins_or_ends(
    begins: bool, said: str, kind: type[HvfreezeError]
) -> None:
    def fail(*of: object) -> Any:
        raise InternalError(said)

    world = object.__new__(HorovodWorld)
    world._hvd = SimpleNamespace(HorovodInternalError=InternalError, synchronize=fail)
    world.watch = SimpleNamespace(waiting=lambda name: nullcontext())  # type: ignore[assignment]
    with pytest.raises(kind, match=f"'loss'.*{said}"):
        world._collect((lambda *of: 1) if begins else fail, None, "loss", None)


def full() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [None, SimpleNamespace(flush=full)], ids=["closed", "full"])
def test_a_job_is_ended_also_by_a_rank_whose_output_is_lost(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    codes: list[int] = []
    world = object.__new__(HorovodWorld)
    world.mpi = SimpleNamespace(Is_finalized=lambda: False, COMM_WORLD=SimpleNamespace(Abort=codes.append))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        patched.setattr(sys, "stderr", stream)
        world.abort(6)
    assert codes == [6]


def test_a_wait_within_another_leaves_that_one_watched() -> None:
    watch = StallWatch(0.0, lambda code: None)
    with watch.waiting("process sets"):
        with watch.waiting("barrier"):
            assert watch._name == "barrier"
        assert watch._name == "process sets" and watch._since < float("inf")
    assert watch._since == float("inf")


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "soon", ""])
def test_a_stall_time_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(STALL_SECONDS, value)
    with pytest.raises(UsageError, match=rf"{STALL_SECONDS} \({value}\) must be a finite number of seconds"):
        stall_limit()


@pytest.mark.parametrize("value", ["0", "2.5"])
def test_a_stall_time_is_read(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(STALL_SECONDS, value)
    assert stall_limit() == float(value)


class Pair(HorovodWorld):
    """Rank 0 of two ranks; the other one has set a cycle time, if `other`."""

    def __init__(self, *, other: bool) -> None:
        self.rank, self.size, self._other = 0, 2, other

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        return [value, ((UsageError, f"${CYCLE_TIME} (2) is set") if self._other else None, None)]


@pytest.mark.parametrize(("mine", "other"), [(True, False), (False, True)])
def test_a_cycle_time_that_one_rank_has_set_is_refused_by_all(
    monkeypatch: pytest.MonkeyPatch, mine: bool, other: bool
) -> None:
    monkeypatch.delenv(CYCLE_TIME, raising=False)
    if mine:
        monkeypatch.setenv(CYCLE_TIME, "2")
    with pytest.raises(UsageError, match=rf"rank {int(other)}: \${CYCLE_TIME} \(2\) is set") as refused:
        Pair(other=other).restart("HVFREEZE_TOLD", "1")
    assert refused.value.everywhere


def test_a_tensor_of_another_shape_ends_the_job_on_the_rank_that_receives_it() -> None:
    wire = Wire(["lane"])
    wire.put(torch.zeros(4), to=0, lane="lane")
    with pytest.raises(DivergedError, match="lane lane: received") as refused:
        wire.get((3,), source=0, lane="lane")
    assert not refused.value.everywhere


class Request:
    """A message that has arrived."""

    def __init__(self, said: str) -> None:
        self._said = said

    def Wait(self, status: object) -> None:  # noqa: N802
        if self._said:
            raise InternalError(self._said)


@pytest.mark.parametrize(
    ("said", "words"), [("", "rank 1 sent 12 bytes on lane lane, but 16 were expected"), ("truncated", "truncated;")]
)
def test_a_message_of_another_length_ends_the_job_on_the_rank_that_receives_it(said: str, words: str) -> None:
    wire = object.__new__(MpiWire)
    status = SimpleNamespace(Get_count=lambda kind: 12)
    wire._mpi = SimpleNamespace(Status=lambda: status, Exception=InternalError, BYTE=None)
    wire._watch, wire._rank = SimpleNamespace(waiting=lambda name: nullcontext()), 0  # type: ignore[assignment]
    wire.counts = {"lane": LaneCounts()}
    wire._expected = defaultdict(deque, {("lane", 1, 0): deque([(torch.empty(4), [Request(said)])])})
    with pytest.raises(DivergedError, match=words) as refused:
        wire.get((4,), source=1, lane="lane")
    assert not refused.value.everywhere
