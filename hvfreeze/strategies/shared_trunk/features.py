"""The trunk's output for the batches of one split: stored where it was met before, else from the line.

The cache knows nothing of ranks: what it would compute, it is handed. So all ranks must agree which batches the line
runs for; what every rank has stored, no rank asks for, and a line that is not asked is silent.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.file.rows import pack_keys
from hvfreeze.config.sections import CacheConfig, DataConfig
from hvfreeze.data.batches import Batch, announce
from hvfreeze.data.draws import Ids
from hvfreeze.prefix.features import Halves
from hvfreeze.prefix.splits import Recipe, Split
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.shared_trunk.line import Line, Served
from hvfreeze.strategies.strategy import Materials

Rows = npt.NDArray[np.int64]
"""(rows, 2): sample ids and views."""


@dataclass
class Handed:
    """What the cache computes rows with: the whole trunk while this rank has it, then what the line has served."""

    split: Split
    halves: Halves
    whole: bool = True
    served: dict[int, Tensor] = field(default_factory=dict)

    def load(self, ids: Ids, views: Ids) -> Tensor:
        """Return images, (B, C, H, W), of which there is no need once the line serves."""
        return self.split.images.load(ids, views) if self.whole else torch.empty(0)

    def compute(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the features behind the first `stop` blocks.

        Raises:
            CacheFault: they were stored, no rank has asked the line for them, and they are stored no more.
        """
        if self.whole:
            return self.halves.prefix(x, start, stop)
        if stop not in self.served:
            raise CacheFault(
                "stored features are lost in the middle of an epoch; go on from the last checkpoint (--resume)"
            )
        return self.served[stop]


@dataclass
class TrunkFeatures:
    """What the heads of this rank train on, or are evaluated on."""

    name: str
    line: Line
    stores: dict[int, PrefixActivations] | None
    """By depth of this rank's heads; None without a cache, the same on all ranks. Opened before the first epoch."""
    handed: Handed
    world: World
    reads_images: bool
    batches_served: int = 0
    serve_seconds: float = 0.0
    batches_silent: int = 0
    _stored: set[int] = field(default_factory=set)
    """Announced batches, by identity, that the line does not run for."""
    _announced: list[Batch] = field(default_factory=list)
    """Kept, so that no other batch gets an identity in `_stored`."""

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Agree for which of these batches the line runs, and begin.

        Collective: every rank of the world must call this.
        """
        self._announced, self._stored = list(batches), set()
        due = list(batches)
        if self.stores is not None:
            for store in self.stores.values():
                store.announce([(batch.ids, batch.views) for batch in batches])
            due = self._fill(self._due(batches))
            self._stored = {id(batch) for batch in batches} - {id(batch) for batch in due}
        self._begin(due)

    def of(self, batch: Batch) -> Served:
        """Return the features of a batch. Collective: all ranks must ask for the same batches in the same order."""
        if self.line.next is not batch and id(batch) not in self._stored:
            self.begin_epoch([batch])
        if self.line.next is batch:
            return self._serve(batch)
        self.batches_silent += 1
        return Served(self._read(batch), None)

    def finish(self) -> None:
        """Leave nothing on the way between ranks. Collective: every rank of the world must call this."""
        self.line.finish()

    def close(self) -> None:
        """Keep what is stored and let go of all files."""
        for store in (self.stores or {}).values():
            store.close()

    def _begin(self, batches: list[Batch]) -> None:
        self.line.begin(batches)
        if self.reads_images:
            announce(self.handed.split.images, batches)

    def _serve(self, batch: Batch) -> Served:
        start = time.perf_counter()
        served = self.line.serve()
        self.serve_seconds += time.perf_counter() - start
        self.batches_served += 1
        if self.stores is None:
            return served
        self.handed.served = served.features
        features = self._read(batch)
        self.handed.served = {}
        return Served(features, served.labels)

    def _read(self, batch: Batch) -> dict[int, Tensor]:
        """Return stored features; those that are not stored are taken from what the line has served, and stored."""
        assert self.stores is not None
        return {d: store.get(batch.ids, batch.views, counted=batch.counted) for d, store in self.stores.items()}

    def _due(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches of which a row is missing on some rank."""
        assert self.stores is not None
        stores = self.stores.values()
        missing = [any(not store.is_cached(b.ids, b.views) for store in stores) for b in batches]
        anywhere = self.world.allreduce_sum(torch.tensor(missing, dtype=torch.int32), name=f"trunk.due.{self.name}")
        return [batch for batch, count in zip(batches, anywhere.tolist(), strict=True) if count]

    def _fill(self, due: list[Batch]) -> list[Batch]:
        """Let the line run for rows that are missing, where rank 0 finds that worth it; return what stays due."""
        if not due:
            return due
        assert self.stores is not None
        missing = self._missing() if self.stores else None
        found = None if missing is None else hashlib.sha256(missing.tobytes()).hexdigest()
        everyone = self.world.allgather_object(found, name=f"trunk.missing.{self.name}")
        alike = len(set(everyone) - {None}) == 1
        rows = worth_filling(missing, due) if alike and self.world.rank == 0 and missing is not None else None
        rows = self.world.broadcast_object(rows, name=f"trunk.rows.{self.name}")
        if rows is None:
            return due
        size = len(due[0].ids)
        batches = []
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            ids, views = np.ascontiguousarray(np.resize(some, (size, 2)).T)
            batches.append(Batch(ids, views, torch.zeros(size, dtype=torch.int64), len(some)))
        self._begin(batches)
        for batch in batches:
            self._serve(batch)
        return self._due(due)

    def _missing(self) -> Rows:
        """Return the rows that some store of this rank lacks."""
        ids, views = self.handed.split.universe()
        lacking = np.zeros(len(ids), dtype=bool)
        for store in (self.stores or {}).values():
            lacking |= store.missing(ids, views)
        return np.unique(np.stack([ids[lacking], views[lacking]], axis=1), axis=0)


def worth_filling(missing: Rows, due: Sequence[Batch]) -> Rows | None:
    """Return which rows to fill in before the batches `due` are asked for, None where there are none.

    What is asked for, if it fits fewer batches than `due`. And with it the rest of all that is missing, where that is
    less than what is asked for: the samples that an epoch leaves out, so that the next one asks for nothing.
    """
    size = len(due[0].ids)
    wanted = np.concatenate([pack_keys(batch.ids, batch.views) for batch in due])
    asked = np.isin(pack_keys(missing[:, 0], missing[:, 1]), wanted)
    rest = missing[~asked]
    if len(rest) >= asked.sum():
        rest = rest[:0]
    together = np.concatenate([missing[asked], rest])
    rows = together if -(-len(together) // size) < len(due) else rest
    return rows if len(rows) else None


def caches(settings: CacheConfig, data: DataConfig) -> bool:
    """Tell whether features are stored: they are few beside the images, and always pay where they come again."""
    return settings.cache != "off" and data.cacheable()


def open_stores(
    materials: Materials,
    settings: CacheConfig,
    recipe: Recipe,
    handed: Handed,
    clock: PhaseClock,
    *,
    place: Path,
    budget: Budget,
    depths: tuple[int, ...],
    exact: bool,
) -> dict[int, PrefixActivations]:
    """Return where the features of this rank's heads are stored, by their depth. Collective."""
    world = materials.world

    def opened(depth: int) -> PrefixActivations:
        store = PrefixActivations(
            run_blocks=handed.compute,
            load_images=handed.load,
            batch_rows=recipe.batch_rows,
            directory=place,
            shard=f"{world.rank}of{world.size}",
            stored=recipe.stored,
            on_failure="stop" if settings.cache_failure == "stop" else "recompute",
            budget=budget,
            owner=str(materials.directory),
            phase=clock.within,
        )
        mark = handed.split.fingerprint(materials.chain, [depth], recipe)
        store.begin_cut(depth, mark=mark, universe=handed.split.universe(), steady=exact)
        return store

    return together(world, lambda: {depth: opened(depth) for depth in depths}, name=f"trunk.cache.{handed.split.name}")
