from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hvfreeze.comm.horovod_world import HorovodWorld
from hvfreeze.comm.stall_watch import StallWatch
from hvfreeze.errors import DivergedError, HvfreezeError, StallError


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
