"""Cached rows in a grid: the first partition that trains reads the frozen prefix's output as its input.

Cached rows need no messages: the ranks before the reader skip such a micro-batch. Other rows come through the pipeline
as usual and are stored on the way. All ranks of a pipeline learn at the start of an epoch which micro-batches are
cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault
from hvfreeze.comm.agreement import TensorLayout, raise_on_all_ranks
from hvfreeze.comm.mesh import Mesh
from hvfreeze.comm.point_to_point import Wire
from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch
from hvfreeze.data.decoding import Inputs
from hvfreeze.data.shards import Ids
from hvfreeze.errors import HvfreezeError, UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.segments import Segment
from hvfreeze.prefix.cache_decision import CostInputs
from hvfreeze.prefix.features import CacheTerms, Features, Halves, open_features
from hvfreeze.prefix.splits import Recipe, RowSource
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.base import BuildContext
from hvfreeze.strategies.grid.partitioning import GridFacts, LocalStage, Partitioning
from hvfreeze.strategies.model_parallel import block_digests, digest_of, receive

REMOTE_ROWS = "errands"
"""The lane of rows that other ranks compute for a cache; checkpoints count its bytes by this name."""
COUNT, IMAGES, OUTPUT = range(3)
"""Its messages: number of rows that follow (0 ends), their images, their output."""


class RemotePrefix:
    """Runs the prefix for the cache of partition `reader`, on whichever ranks its blocks are.

    `segments` are the blocks of each partition, `boundaries` the layouts by rows of a batch and depth.
    """

    def __init__(
        self,
        mesh: Mesh,
        segments: Sequence[Segment],
        reader: int,
        *,
        halves: Halves,
        wire: Wire,
        boundaries: Mapping[int, Sequence[TensorLayout]],
    ) -> None:
        self._mesh, self._reader, self._segment = mesh, reader, segments[mesh.partition]
        self._halves, self._wire, self._boundaries = halves, wire, boundaries
        self._served = False
        self.came: Tensor | None = None
        """In a step: the tensor from the pipeline, from which the next rows are computed."""

    @contextmanager
    def served(self) -> Iterator[None]:
        """On the reader: use the ranks before this one, which must be in `serve`, inside the context."""
        self._served = True
        try:
            yield
        finally:
            self._served = False
            for partition in range(self._reader):
                self._announce(partition, 0)
            self._wire.drain()

    def serve(self) -> None:
        """On a rank before the reader: run its blocks on the reader's images until the reader ends it."""
        (start, stop), reader = self._segment, self._mesh.rank_of(self._reader)
        while rows := int(self._wire.get((1,), dtype=torch.int64, source=reader, lane=REMOTE_ROWS, seq=COUNT)):
            if self._mesh.before is None:
                x = self._get(0, rows, source=reader, seq=IMAGES)
            else:
                x = self._get(start, rows, source=self._mesh.before, seq=OUTPUT)
            assert self._mesh.after is not None, "a rank before the reader must have a successor"
            self._put(stop, self._halves.prefix(x, start, stop), to=self._mesh.after, seq=OUTPUT)
            self._wire.drain()

    def load(self, images: Inputs, ids: Ids, views: Ids) -> Tensor:
        """Return images, (B, C, H, W); empty if their output has already arrived."""
        return images.load(ids, views) if self.came is None else torch.empty(0)

    def run(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of frozen blocks start..stop-1 for `x`; start is 0 if other ranks hold some of the blocks.

        Raises:
            CacheFault: the rows were cached, so nothing was sent for them, but they are lost.
        """
        own = self._segment[0]
        if start < own:
            x, start = self._brought(x), own
        return self._halves.prefix(x, start, stop)

    def _brought(self, images: Tensor) -> Tensor:
        """Return the input of this rank's blocks for these images."""
        if self.came is not None:
            return self.came
        if not self._served:
            raise CacheFault(
                "cached rows were lost in the middle of an epoch; resume from the last checkpoint (--resume)"
            )
        for partition in range(self._reader):
            self._announce(partition, len(images))
        self._put(0, images, to=self._mesh.rank_of(0), seq=IMAGES)
        assert self._mesh.before is not None, "this rank must have a predecessor"
        return self._get(self._segment[0], len(images), source=self._mesh.before, seq=OUTPUT)

    def _announce(self, partition: int, rows: int) -> None:
        self._wire.put(torch.tensor([rows]), to=self._mesh.rank_of(partition), lane=REMOTE_ROWS, seq=COUNT)

    def _put(self, depth: int, x: Tensor, *, to: int, seq: int) -> None:
        self._wire.put(self._boundaries[len(x)][depth].flat(x.detach()), to=to, lane=REMOTE_ROWS, seq=seq)

    def _get(self, depth: int, rows: int, *, source: int, seq: int) -> Tensor:
        return receive(self._wire, self._boundaries[rows][depth], source=source, lane=REMOTE_ROWS, seq=seq)


class FrozenDigests:
    """Digests of all frozen blocks, on whichever ranks they are."""

    def __init__(self, world: World, chain: Chain) -> None:
        self._world, self._chain = world, chain
        self._known: list[str] = []

    def learn(self, cut: int, held: Segment) -> None:
        """Exchange the digests of newly frozen blocks; this rank holds `held`. Collective."""
        del self._known[cut:]
        known = len(self._known)
        if known == cut:
            return
        blocks = range(max(held[0], known), min(held[1], cut))
        found: dict[int, str] = {}
        for theirs in self._world.allgather_object(block_digests(self._chain, blocks), name="grid.frozen"):
            found |= theirs
        self._known += [found[block] for block in range(known, cut)]

    def forget(self) -> None:
        """Drop all digests, because other values were loaded."""
        self._known.clear()

    def of(self, blocks: int) -> str:
        """Return the digest of the first `blocks` blocks; call `learn` before."""
        return digest_of(self._known[:blocks])


def keeps_rows(config: Config, facts: GridFacts, world: World) -> bool:
    """Return True if rows may be cached; equal on all ranks.

    Raises:
        UsageError: settings do not fit each other.
    """
    settings, rows, freeze = config.cache, config.optimizer.batch_size, config.freeze.freeze
    if settings.cache == "off" or not config.data.cacheable():
        return False
    if facts.parts > 1 and settings.cache_dtype != "native" and freeze not in ("none", "static"):
        raise UsageError(
            f"--cache-dtype ({settings.cache_dtype}) must be native with --freeze {freeze} and --parts {facts.parts}, "
            "because rows are rounded after each cut, and an earlier cut may be on another rank; use native, "
            "--freeze static or --parts 1"
        )
    if facts.repartitions and world.local_size < world.size and not settings.cache_shared:
        raise UsageError(
            "--redeal (on) on several nodes needs --cache-shared or --cache off, because ranks read rows that "
            "other ranks have stored"
        )
    if rows % facts.micro_batches == 0:
        return True
    if settings.cache == "on":
        raise UsageError(
            f"--micro-batches ({facts.micro_batches}) must divide --batch-size ({rows}) with --cache on, because "
            "rows are computed in batches of one size"
        )
    return False


@dataclass
class CachedRows:
    """The rows of one split, `train` or `test`, for this rank's pipeline."""

    name: str
    context: BuildContext
    config: Config
    stage: LocalStage
    digests: FrozenDigests
    open_remote: Callable[[int], RemotePrefix]
    """Remote prefixes by the reader's partition."""
    cost_inputs: Callable[[], CostInputs]
    clock: PhaseClock
    keeps: bool
    """Whether rows may be cached; if not, every batch enters as images."""
    depth: int = 0
    """Depth of the cached rows in frozen blocks; 0 while nothing is cached."""
    reader: int = 0
    """The partition that reads rows; 0 while nothing is cached."""
    _opened: tuple[Partitioning, int] | None = None
    _features: Features | None = None
    _remote: RemotePrefix | None = None
    _cuts: tuple[int, ...] = ()
    _cached: frozenset[bytes] = frozenset()
    _earlier: dict[str, Any] = field(default_factory=dict)
    """The report of closed caches."""
    _answers: bool = False
    """Whether this rank reports for all readers."""
    _lines: list[str] = field(default_factory=list)
    """Log lines of this rank's cache, which `begin_epoch` returns."""

    def begin_epoch(self, batches: Sequence[Batch]) -> list[str]:
        """Prepare for these batches or micro-batches of this rank's pipeline; return lines for the user. Collective.

        Raises:
            CacheFault: the cache failed, and --cache-failure is `stop`; on all ranks, or with several replicas on one
                rank, which ends the job.
        """
        self.depth, self.reader, self._cached = 0, 0, frozenset()
        mesh, partitioning, cut = self.stage.mesh, self.stage.partitioning, self.stage.freezer.cut
        if not self.keeps:
            return []
        if cut == 0:
            self.digests.forget()
            return []
        world, reader = mesh.world, partitioning.partition_of(cut)
        if self._opened != (partitioning, reader):
            self._let_go()
            self._opened, self._remote = (partitioning, reader), self.open_remote(reader)
            self._answers = mesh.replica == 0
        assert self._remote is not None
        remote = self._remote
        self.digests.learn(cut, self.stage.segment)

        def work() -> None:
            if mesh.partition < reader:
                remote.serve()
            elif mesh.partition == reader:
                with remote.served():
                    self._follow(remote).begin_epoch(batches)

        if mesh.replicas == 1:
            raise_on_all_ranks(world, work, name=f"grid.cache.{self.name}")
        else:
            # `work` has collectives among readers, so after an error of one reader the others would wait in them.
            try:
                work()
            except HvfreezeError as error:
                error.on_this_rank()
                raise
        gathered = world.allgather_object((self._found(batches), list(self._lines)), name=f"grid.cached.{self.name}")
        found, lines = gathered[mesh.rank_of(reader)][0], gathered[mesh.rank_of(reader, replica=0)][1]
        readers = [mesh.rank_of(reader, replica=replica) for replica in range(mesh.replicas)]
        if found is not None and all(gathered[rank][0] is not None for rank in readers):
            self.depth, self.reader = cut, reader
            self._cached = frozenset(key_of(batch) for batch, there in zip(batches, found, strict=True) if there)
        self._lines.clear()
        # All readers have the same lines.
        return lines

    def cached(self, batch: Batch) -> bool:
        """Return True if a batch is cached, so that nothing is sent for it. Not a collective."""
        return bool(self._cached) and key_of(batch) in self._cached

    def read(self, batch: Batch, came: Tensor | None) -> Tensor:
        """Return the features of a batch on the reader; `came` has arrived through the pipeline if it is not cached.

        Raises:
            CacheFault: rows that were cached at the start of the epoch are lost.
        """
        assert self._features is not None and self._remote is not None
        self._remote.came = came
        try:
            return self._features.of(batch)
        finally:
            self._remote.came = None

    def report(self) -> dict[str, Any] | None:
        """Return this rank's part of summary.json's `cache`; one reader reports for all. Collective among readers."""
        local = None if self._features is None else self._features.report()
        return merged(self._earlier, local) if local is not None and self._answers else self._earlier or None

    def close(self) -> None:
        """Publish cached rows and close all files. Not a collective."""
        if self._features is not None:
            self._features.close()

    def _let_go(self) -> None:
        """Close the cache, which another rank will open. Collective."""
        report = self.report()
        self._earlier = {**report, "bytes": 0} if report is not None else {}
        self._cuts = ()
        # On all ranks, because the next readers read these rows.
        raise_on_all_ranks(self.stage.mesh.world, self.close, name=f"grid.cache.{self.name}.close")
        self._features = None

    def _follow(self, remote: RemotePrefix) -> Features:
        """Return the features at the current cut. Collective among readers."""
        if self._features is None:
            self._features = self._open(remote)
        cuts = self.stage.freezer.prefix.cuts
        if self._cuts != cuts:
            self._features.move(cuts)
            self._cuts = cuts
        return self._features

    def _open(self, remote: RemotePrefix) -> Features:
        """Open the cache; if pipelines share a replica's samples, each stores a part and all read training rows."""
        config, context, stage, rows = self.config, self.context, self.stage, self.config.optimizer.batch_size
        if self.name == "train":
            split = context.trained()
            split = replace(split, ids=split.ids[stage.line :: stage.lines])
            rows //= stage.facts.micro_batches
        else:
            split = context.tested(passes_per_epoch=1 / config.run.evaluate_every)
            # Pipelines divide the evaluation samples by whole batches.
            split = replace(split, ids=split.ids[np.arange(len(split.ids)) // rows % stage.lines == stage.line])
        source = RowSource(
            split=split,
            recipe=Recipe.of(config, rows),
            chain=stage.chain,
            digest=self.digests.of,
            load_images=lambda ids, views: remote.load(split.images, ids, views),
            run_blocks=remote.run,
            shared=self.name == "train" and stage.lines > 1,
        )
        terms = CacheTerms(
            settings=config.cache,
            data=config.data,
            mixed=context.corpus.plan.mixes,
            world=stage.mesh.replica_world,
            # Timings of whole batches do not apply to micro-batches.
            costs=replace(self.cost_inputs(), _trials={}),
            owner=str(context.directory),
            say=self._lines.append,
        )
        return open_features(terms, source, clock=self.clock)

    def _found(self, batches: Sequence[Batch]) -> list[bool] | None:
        """Return on a reader which batches are cached."""
        if self._features is None or not self._features.keeps:
            return None
        activations = self._features.activations
        return [activations.is_cached(batch.ids, batch.views) for batch in batches]


def key_of(batch: Batch) -> bytes:
    """Return a key of a batch: its samples and views, in order."""
    return np.concatenate([batch.ids, batch.views]).tobytes()


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return one entry `cache` for two caches of one run, used one after the other or at the same time."""
    if not earlier:
        return dict(later)
    summed = {key: value + later[key] for key, value in earlier.items() if key not in ("mode", "exact")}
    return {**later, "exact": earlier["exact"] and later["exact"], **summed}
