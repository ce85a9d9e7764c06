from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.comm.mesh import Mesh
from hvfreeze.comm.world import World
from hvfreeze.config.tree import from_dict
from hvfreeze.errors import UsageError
from hvfreeze.prefix.features import Halves
from hvfreeze.strategies.grid.cached_rows import CachedRows, FrozenDigests, RemotePrefix, keeps_rows
from hvfreeze.strategies.grid.partitioning import GridFacts, LocalStage, Partitioning
from tests.single.ranks_in_threads import on_ranks


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


@pytest.mark.parametrize(
    ("parts", "changes", "refused"),
    [
        (2, {"freeze": "linear", "cache_dtype": "float16"}, True),
        (1, {"freeze": "linear", "cache_dtype": "float16"}, False),
        (2, {"freeze": "static", "cut": 1, "cache_dtype": "float16"}, False),
        (2, {"freeze": "linear"}, False),
    ],
)
def test_rows_that_are_rounded_at_several_cuts_are_refused_where_these_are_on_several_ranks(
    parts: int, changes: dict[str, Any], refused: bool
) -> None:
    config = from_dict({"strategy": "grid", "cache": "on", "augment": "none", **changes})
    facts = GridFacts(parts=parts, replicas=1, micro_batches=1, schedule="1f1b", cache="on", repartitions=False)
    if refused:
        with pytest.raises(UsageError, match=r"--cache-dtype \(float16\) must be native .*--parts 2,.*use native,"):
            keeps_rows(config, facts, World())
    else:
        assert keeps_rows(config, facts, World())


def test_a_reader_that_fails_ends_the_job_while_another_replicas_reader_waits_for_it() -> None:
    def begin(world: World) -> None:
        def follow(remote: RemotePrefix) -> Any:
            if world.rank == 1:
                raise CacheFault("the disk is full").on_all_ranks()
            return world.allgather_object(None, name="readers")

        stage = SimpleNamespace(
            mesh=Mesh(world), segment=(0, 2), freezer=SimpleNamespace(cut=1), partitioning=Partitioning(((0, 2),))
        )
        other: Any = None
        rows = CachedRows(
            "train",
            other,
            other,
            cast(LocalStage, stage),
            cast(FrozenDigests, SimpleNamespace(learn=lambda cut, held: None)),
            lambda reader: cast(RemotePrefix, SimpleNamespace(served=nullcontext)),
            other,
            other,
            keeps=True,
        )
        with patch.object(rows, "_follow", follow), patch.object(rows, "report", lambda: None):
            rows.begin_epoch([])

    with pytest.raises(CacheFault, match=r"^the disk is full") as fault:
        on_ranks(2, begin)
    assert not fault.value.everywhere
