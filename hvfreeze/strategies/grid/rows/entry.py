"""Where batches come into a line: as images in its first partition, or as cached rows in the first one that trains.

The frozen prefix's output is kept by the rank that needs it as its input, so that what is cached moves no byte: the
ranks before it have nothing to do for such a micro-batch. What is not cached comes through the line as ever, and is
kept as it passes. All ranks of a line learn at an epoch's start which micro-batches are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.data.batches import Batch
from hvfreeze.prefix.features import Features
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.mesh import Mesh
from hvfreeze.ranks.world import World
from hvfreeze.strategies.grid.dealing.deal import Deal
from hvfreeze.strategies.grid.dealing.holding import Holding
from hvfreeze.strategies.grid.rows.errands import Errands
from hvfreeze.strategies.grid.rows.frozen import SpreadPrefix


class OpenFeatures(Protocol):
    """Opens the cache of a split on all readers of a deal, who call it together; see `Keeper.open`."""

    def __call__(
        self, holding: Holding, errands: Errands, *, digest: Callable[[int], str], say: Callable[[str], None]
    ) -> Features:
        """Return it."""


OpenErrands = Callable[[Mesh, Deal, int], Errands]
"""(this rank's place, the deal, the reader's partition)."""
Report = dict[str, Any]


class AsImages:
    """Nothing is cached: every batch comes in as images."""

    depth = 0
    reader = 0

    def begin_epoch(self, batches: Sequence[Batch], holding: Holding, prefix: SpreadPrefix) -> list[str]:
        """Do nothing. Collective in `AsRows`."""
        return []

    def cached(self, batch: Batch) -> bool:
        """Return False."""
        return False

    def read(self, batch: Batch, came: Tensor | None) -> Tensor:
        """Is never asked."""
        raise AssertionError("nothing is cached")

    def report(self) -> None:
        """Return None. Collective in `AsRows`."""

    def close(self) -> None:
        """Do nothing."""


class AsRows:
    """Rows of the frozen prefix's output are cached, where --cache says so.

    Attributes:
        depth: frozen blocks that a row has behind it; 0 while nothing is cached.
        reader: the partition that reads rows; 0 while nothing is cached.
    """

    def __init__(self, name: str, world: World, open_errands: OpenErrands, open_features: OpenFeatures) -> None:
        self.depth, self.reader = 0, 0
        self._name, self._world = name, world
        self._open_errands, self._open_features = open_errands, open_features
        self._opened: tuple[Deal, int] | None = None
        self._features: Features | None = None
        self._errands: Errands | None = None
        self._cuts: tuple[int, ...] = ()
        self._cached: frozenset[bytes] = frozenset()
        self._earlier: Report = {}
        self._answers = False
        """Whether this rank reports what all readers have in common."""
        self._lines: list[str] = []
        """That a reader has for the user."""

    def begin_epoch(self, batches: Sequence[Batch], holding: Holding, prefix: SpreadPrefix) -> list[str]:
        """Get ready for these batches, or micro-batches, of this rank's line, in order; return lines for the user.

        What the cache does now and then, such as to compare a file's rows, is done here.
        Collective: every rank of the world must call this.

        Raises:
            CacheFault: something is wrong with the cache, and --cache-failure is `stop`; on all ranks.
        """
        mesh, deal = holding.mesh, holding.deal
        self.depth, self.reader, self._cached = 0, 0, frozenset()
        cut = prefix.cuts[-1]
        if cut == 0:
            return []
        reader = deal.partition_of(cut)
        if self._opened != (deal, reader):
            self._let_go()
            self._opened, self._errands = (deal, reader), self._open_errands(mesh, deal, reader)
            self._answers = mesh.replica == 0
        assert self._errands is not None
        errands = self._errands
        prefix.learn()

        def work() -> None:
            if mesh.partition < reader:
                errands.serve()
            elif mesh.partition == reader:
                with errands.served():
                    self._follow(holding, errands, prefix).begin_epoch(batches)

        # Collectives in there are the readers' own, and fail on all of them; the others are told by the last errand.
        together(self._world, work, name=f"grid.cache.{self._name}")
        everyone = self._world.allgather_object(
            (self._found(batches), list(self._lines)), name=f"grid.cached.{self._name}"
        )
        found = everyone[mesh.rank_of(reader)][0]
        if found is not None and all(everyone[rank][0] is not None for rank in readers_of(mesh, reader)):
            self.depth, self.reader = cut, reader
            self._cached = frozenset(key_of(batch) for batch, there in zip(batches, found, strict=True) if there)
        self._lines.clear()
        # All readers have the same to say.
        return everyone[mesh.rank_of(reader, replica=0)][1]

    def cached(self, batch: Batch) -> bool:
        """Tell whether a batch is read, so that nothing of it comes through the line. Not a collective."""
        return key_of(batch) in self._cached

    def read(self, batch: Batch, came: Tensor | None) -> Tensor:
        """Return on the reader the features of a batch; `came` is what has come through the line, if it had to.

        Raises:
            CacheFault: what was cached at the epoch's start is lost.
        """
        assert self._features is not None and self._errands is not None
        self._errands.came = came
        try:
            return self._features.of(batch)
        finally:
            self._errands.came = None

    def report(self) -> Report | None:
        """Return what this rank answers for of summary.json's `cache`; one reader does for all of them.

        Collective among the readers.
        """
        mine = None if self._features is None else self._features.caching.report()
        return merged(self._earlier, mine) if mine is not None and self._answers else self._earlier or None

    def close(self) -> None:
        """Keep what is cached and let go of all files. Not a collective."""
        if self._features is not None:
            self._features.close()

    def _let_go(self) -> None:
        """Close what another rank is to open. Collective among the readers there were."""
        report = self.report()
        self._earlier = {**report, "bytes": 0} if report is not None else {}
        self._cuts = ()
        # All ranks: what was kept is read by others next.
        together(self._world, self.close, name=f"grid.cache.{self._name}.close")
        self._features = None

    def _follow(self, holding: Holding, errands: Errands, prefix: SpreadPrefix) -> Features:
        if self._features is None:
            self._features = self._open_features(holding, errands, digest=prefix.digest, say=self._lines.append)
        if self._cuts != prefix.cuts:
            self._features.move(prefix.cuts[-1], before=prefix.cuts[:-1])
            self._cuts = prefix.cuts
        return self._features

    def _found(self, batches: Sequence[Batch]) -> list[bool] | None:
        """Return on a reader, where rows are kept, which batches are read."""
        if self._features is None or not self._features.caching.keeps:
            return None
        activations = self._features.caching.activations
        assert isinstance(activations, PrefixActivations), "only those are kept"
        return [activations.is_cached(batch.ids, batch.views) for batch in batches]


Entry = AsImages | AsRows
"""Where the batches of one split come into the line."""


def readers_of(mesh: Mesh, partition: int) -> list[int]:
    """Return the ranks that hold a partition."""
    return [mesh.rank_of(partition, replica=replica) for replica in range(mesh.replicas)]


def key_of(batch: Batch) -> bytes:
    """Return what tells a batch from others: its samples and views, in order."""
    return np.concatenate([batch.ids, batch.views]).tobytes()


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> Report:
    """Return one entry `cache` for two caches of one run, one after the other or beside each other."""
    if not earlier:
        return dict(later)
    summed = {key: value + later[key] for key, value in earlier.items() if key not in ("mode", "exact")}
    return {**later, "exact": earlier["exact"] and later["exact"], **summed}
