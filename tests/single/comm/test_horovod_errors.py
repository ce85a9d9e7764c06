from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hvfreeze.comm.horovod_world import HorovodWorld
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
