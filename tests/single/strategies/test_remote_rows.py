from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.comm.mesh import Mesh
from hvfreeze.comm.world import World
from hvfreeze.prefix.features import Halves
from hvfreeze.strategies.grid.cached_rows import RemotePrefix


def reader() -> RemotePrefix:
    """The second of two partitions, whose blocks add 1 each, with no rank to ask."""
    mesh = Mesh(cast(World, SimpleNamespace(rank=1, size=2)), 2)
    halves = cast(Halves, SimpleNamespace(prefix=lambda x, start, stop: x + (stop - start)))
    nobody: Any = None
    return RemotePrefix(mesh, [(0, 1), (1, 4)], 1, halves=halves, wire=nobody, boundaries={})


def test_rows_that_are_lost_in_a_step_are_not_waited_for() -> None:
    with pytest.raises(CacheFault, match=r"lost in the middle of an epoch.*--resume"):
        reader().run(torch.zeros(2), 0, 3)


def test_what_has_come_through_the_line_is_what_rows_are_computed_from() -> None:
    prefix = reader()
    prefix.came = torch.full((2,), 10.0)
    assert prefix.load(cast(Any, None), cast(Any, None), cast(Any, None)).numel() == 0, "images are not read"
    assert prefix.run(torch.empty(0), 0, 3).tolist() == [12.0, 12.0]
    assert prefix.run(torch.zeros(2), 2, 4).tolist() == [2.0, 2.0], "rows of a cut before are gone on from"
