"""The trunk's output for the batches of one split: from the cache if stored, else from the pipeline.

The cache does not know about ranks: it is given what it would compute. So all ranks must agree on the batches that the
pipeline runs for. If every rank has stored a batch's rows, the pipeline does not run for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.file.format import pack_keys
from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.world import World
from hvfreeze.config.cache import CacheConfig
from hvfreeze.data.batches import Batch, announce
from hvfreeze.data.shards import Ids
from hvfreeze.prefix.features import Halves
from hvfreeze.prefix.splits import Recipe, Split
from hvfreeze.strategies.base import BuildContext
from hvfreeze.strategies.shared_trunk.line import Line, Served

Keys = npt.NDArray[np.int64]
"""(rows, 2): sample ids and views."""


@dataclass
class FeatureSource:
    """Computes the cache's rows: with the whole trunk while this rank has it, then from the pipeline's output."""

    split: Split
    halves: Halves
    whole: bool = True
    served: dict[int, Tensor] = field(default_factory=dict)

    def load(self, ids: Ids, views: Ids) -> Tensor:
        """Return images, (B, C, H, W); empty once the pipeline serves."""
        return self.split.images.load(ids, views) if self.whole else torch.empty(0)

    def compute(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the features behind the first `stop` blocks.

        Raises:
            CacheFault: they were stored, so the pipeline did not run for them, but they are lost.
        """
        if self.whole:
            return self.halves.prefix(x, start, stop)
        if stop not in self.served:
            raise CacheFault(
                "stored features were lost in the middle of an epoch; resume from the last checkpoint (--resume)"
            )
        return self.served[stop]


@dataclass
class TrunkFeatures:
    """The input of this rank's heads, in training or in evaluation."""

    line: Line
    source: FeatureSource
    world: World
    stores: dict[int, PrefixActivations] | None = None
    """Caches by depth of this rank's heads; None without a cache, equal on all ranks. Opened before the first epoch."""
    batches_served: int = 0
    serve_seconds: float = 0.0
    batches_silent: int = 0
    _stored: set[int] = field(default_factory=set)
    """Announced batches, by identity, for which the pipeline does not run."""
    _announced: list[Batch] = field(default_factory=list)
    """References that prevent another batch from getting an identity in `_stored`."""

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Agree on the batches for which the pipeline runs, and start. Collective."""
        self._announced, self._stored = list(batches), set()
        due = list(batches)
        if self.stores is not None:
            for store in self.stores.values():
                store.announce([(batch.ids, batch.views) for batch in batches])
            due = self._fill(self._due(batches), self.stores)
            self._stored = {id(batch) for batch in batches} - {id(batch) for batch in due}
        self._begin(due)

    def of(self, batch: Batch) -> Served:
        """Return the features of a batch; all ranks must request the same batches in the same order. Collective."""
        if self.line.next is not batch and id(batch) not in self._stored:
            self.begin_epoch([batch])
        if self.line.next is batch:
            return self._serve(batch)
        self.batches_silent += 1
        return Served(self._read(batch), None)

    def open_stores(
        self, context: BuildContext, settings: CacheConfig, recipe: Recipe, *, budget: Budget, exact: bool
    ) -> None:
        """Open the cache of this rank's heads, while the whole trunk is present. Collective."""
        world, split = self.world, self.source.split

        def opened(depth: int) -> PrefixActivations:
            store = PrefixActivations(
                run_blocks=self.source.compute,
                load_images=self.source.load,
                batch_rows=recipe.batch_rows,
                directory=context.cache_directory(settings),
                shard=f"{world.rank}of{world.size}",
                stored=recipe.stored,
                on_failure="stop" if settings.cache_failure == "stop" else "recompute",
                budget=budget,
                owner=str(context.directory),
                phase=self.line.clock.within,
            )
            fingerprint = split.fingerprint(context.chain, [depth], recipe)
            store.begin_cut(depth, fingerprint=fingerprint, owned_keys=split.owned_keys(), batch_invariant=exact)
            return store

        depths = self.line.plan.depths[self.line.rank]
        self.stores = raise_on_all_ranks(
            world, lambda: {depth: opened(depth) for depth in depths}, name=f"trunk.cache.{split.name}"
        )

    def close(self) -> None:
        """Publish cached rows and close all files."""
        for store in (self.stores or {}).values():
            store.close()

    def _begin(self, batches: list[Batch]) -> None:
        self.line.begin(batches)
        if self.line.rank == 0:
            announce(self.source.split.images, batches)

    def _serve(self, batch: Batch) -> Served:
        start = time.perf_counter()
        served = self.line.serve()
        self.serve_seconds += time.perf_counter() - start
        self.batches_served += 1
        if self.stores is None:
            return served
        self.source.served = served.features
        features = self._read(batch)
        self.source.served = {}
        return Served(features, served.labels)

    def _read(self, batch: Batch) -> dict[int, Tensor]:
        """Return cached features; missing ones are taken from the pipeline's output and stored."""
        assert self.stores is not None
        return {d: store.get(batch.ids, batch.views, counted=batch.counted) for d, store in self.stores.items()}

    def _due(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches of which a row is missing on some rank."""
        stores = (self.stores or {}).values()
        missing = [any(not store.is_cached(b.ids, b.views) for store in stores) for b in batches]
        name = f"trunk.due.{self.source.split.name}"
        anywhere = self.world.allreduce_sum(torch.tensor(missing, dtype=torch.int32), name=name)
        return [batch for batch, count in zip(batches, anywhere.tolist(), strict=True) if count]

    def _fill(self, due: list[Batch], stores: dict[int, PrefixActivations]) -> list[Batch]:
        """Run the pipeline for rows that some rank lacks, if that is worthwhile; return the batches that remain."""
        if not due:
            return due
        split = self.source.split
        ids, views = split.owned_keys()
        lacking = np.zeros(len(ids), np.int32)
        for store in stores.values():
            lacking |= store.missing(ids, views)
        name = f"trunk.missing.{split.name}"
        anywhere = self.world.allreduce_sum(torch.from_numpy(lacking), name=name).numpy() > 0
        missing = np.unique(np.stack([ids[anywhere], views[anywhere]], axis=1), axis=0)
        # Equal on all ranks, which have the same batches.
        rows, size = worth_filling(missing, due), len(due[0].ids)
        batches = []
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            ids, views = np.ascontiguousarray(np.resize(some, (size, 2)).T)
            batches.append(Batch(ids, views, torch.zeros(size, dtype=torch.int64), len(some)))
        self._begin(batches)
        for batch in batches:
            self._serve(batch)
        return self._due(due) if batches else due


def worth_filling(missing: Keys, due: Sequence[Batch]) -> Keys:
    """Return the rows to compute before the batches `due` are requested; there may be none.

    These are the missing rows of `due`, if they fit into fewer batches. All other missing rows are added if they are
    the fewer ones: the samples that an epoch leaves out, so that the next epoch needs nothing.
    """
    size = len(due[0].ids)
    wanted = np.concatenate([pack_keys(batch.ids, batch.views) for batch in due])
    asked = np.isin(pack_keys(missing[:, 0], missing[:, 1]), wanted)
    rest = missing[~asked]
    if len(rest) >= asked.sum():
        rest = rest[:0]
    both = np.concatenate([missing[asked], rest])
    return both if -(-len(both) // size) < len(due) else rest
