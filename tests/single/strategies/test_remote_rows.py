from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.comm.mesh import Mesh
from hvfreeze.comm.world import World
from hvfreeze.config.tree import from_dict
from hvfreeze.prefix.cache_decision import CostInputs
from hvfreeze.prefix.features import Halves
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.grid import cached_rows
from hvfreeze.strategies.grid.cached_rows import CachedRows, RemotePrefix


def reader() -> RemotePrefix:
    """The second of two partitions, whose blocks add 1 each, with nobody to ask."""
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


@dataclass
class Samples:
    ids: np.ndarray
    images: Any = None


@pytest.mark.parametrize(
    ("name", "lines", "rows"), [("train", 1, 2), ("train", 2, 2), ("test", 1, 16), ("test", 2, 16)]
)
def test_training_reads_micro_batches_and_evaluation_whole_batches(
    name: str, lines: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr(cached_rows, "open_features", lambda terms, source, clock: opened.append((terms, source)))
    split = Samples(np.arange(64))
    context: Any = SimpleNamespace(
        trained=lambda: split,
        tested=lambda passes_per_epoch: split,
        corpus=SimpleNamespace(plan=SimpleNamespace(mixes=False)),
        directory=Path("run"),
    )
    stage: Any = SimpleNamespace(
        lines=lines,
        line=0,
        facts=SimpleNamespace(micro_batches=8),
        chain=None,
        mesh=SimpleNamespace(replica_world=None),
    )
    anything: Any = SimpleNamespace(of=None, load=None, run=None)
    costs = CostInputs(horizon=anything, budget=anything, directory=Path("cache"), memory_bytes=1)
    config = from_dict({"batch_size": 16})
    cached = CachedRows(
        name, context, config, stage, anything, lambda reader: anything, lambda: costs, PhaseClock(), keeps=True
    )
    cached._open(anything)
    ((terms, source),) = opened
    assert source.recipe.batch_rows == rows
    assert terms.costs._trials is not costs._trials, "trials of whole batches say nothing about micro-batches"
