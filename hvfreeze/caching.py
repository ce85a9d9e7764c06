"""How a run uses the activation cache: what its rows are, when they are kept, and what that saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvfreeze.blocks import Chain
from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.budget import Budget
from hvfreeze.cache.compute import Activations, NullActivations, permuted_batch_is_exact
from hvfreeze.cache.fingerprint import Fingerprint, activation_fingerprint, digest_tensors
from hvfreeze.clock import PhaseClock
from hvfreeze.config import Config
from hvfreeze.feed import Batch, Ids, Images
from hvfreeze.world import World

STORED_TYPES = {"native": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
MEMORY_FORMAT = "channels_last"


@dataclass(frozen=True)
class Split:
    """The samples of one split that this rank asks for, and what identifies them."""

    name: str
    """`train` or `test`."""
    identity: str
    images: Images
    ids: Ids
    """(N,) samples that this rank may store."""

    @property
    def num_views(self) -> int:
        """Distinct views of a sample."""
        return max(1, self.images.transform.augment.num_views)

    def universe(self) -> tuple[Ids, Ids]:
        """Return (sample ids, views), (N x views,) each: every row that this rank may store."""
        views = np.arange(self.num_views, dtype=np.int64)
        return np.tile(self.ids, self.num_views), np.repeat(views, len(self.ids))


class NoCache:
    """`--cache off`: the prefix is computed in every epoch."""

    def __init__(self, activations: NullActivations) -> None:
        self.activations: Activations = activations

    def move(self, history: Sequence[Sequence[int]]) -> None:
        """Follow the cut. Collective in `Caching`."""
        self.activations.begin_cut(history[-1][2])

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Do nothing. Collective in `Caching`."""

    def report(self) -> dict[str, Any]:
        """Return summary.json's `cache`. Collective in `Caching`."""
        return {
            "mode": "off",
            "exact": True,
            "bytes": 0,
            "rows_written": 0,
            "rows_read": 0,
            "seconds_saved_predicted": 0.0,
            "seconds_saved": 0.0,
        }


@dataclass
class Caching:
    """`--cache on` or `auto`: rows are kept at every cut, and later epochs read them."""

    config: Config
    chain: Chain
    world: World
    split: Split
    activations: PrefixActivations
    probe: Callable[[Tensor, int], Tensor]
    """(images, cut) -> the prefix's output."""
    exact: bool = True
    forward_seconds: float = 0.0
    predicted: float = 0.0
    _cut: int = field(default=0)

    def move(self, history: Sequence[Sequence[int]]) -> None:
        """Follow the cut to the end of `history`; rows of the cut before serve until there are new ones.

        Collective: every rank of the world must call this in the same step.
        """
        self._cut = history[-1][2]
        if self._cut == 0:
            self.activations.begin_cut(0)
            return
        self.exact = self.exact and self._permutation_is_exact()
        self.activations.begin_cut(self._cut, mark=self._mark(rounded_before(history)), universe=self.split.universe())
        if self.config.data.shuffle == "global":
            # No rank knows its own samples beforehand: each computes a fixed share and all read all.
            self.activations.sweep(everything=True)
            self.activations.publish()
            self.world.barrier(name=f"cache.{self.split.name}")
            self.activations.refresh()

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Announce an epoch's batches, and fill in what a partly filled cache lacks where that saves forwards.

        Collective: every rank of the world must call this.
        """
        self._agree_on_failure()
        self.activations.announce([(batch.ids, batch.views) for batch in batches])
        self.activations.sweep()

    def report(self) -> dict[str, Any]:
        """Return summary.json's `cache`, summed over ranks.

        Collective: every rank of the world must call this.
        """
        counters = self.activations.counters
        per_forward = self.forward_seconds / max(1, counters.forwards)
        batches_read = counters.rows_read / self.config.optimizer.batch_size
        saved = batches_read * per_forward - counters.read_seconds - counters.write_seconds
        mine = {
            "bytes": self.activations.stored_bytes,
            "rows_written": counters.rows_written,
            "rows_read": counters.rows_read,
        }
        exact = self.exact and self.activations.exact
        everyone = self.world.allgather_object((mine, exact, saved), name="cache.report")
        return {
            "mode": self.config.cache.cache,
            "exact": all(exact for _, exact, _ in everyone),
            **{key: sum(theirs[key] for theirs, _, _ in everyone) for key in mine},
            "seconds_saved_predicted": self.predicted,
            "seconds_saved": sum(theirs for _, _, theirs in everyone) / self.world.size,
        }

    def _agree_on_failure(self) -> None:
        reasons = self.world.allgather_object(self.activations.failed, name=f"cache.failed.{self.split.name}")
        for rank, reason in enumerate(reasons):
            if reason is not None and self.activations.failed is None:
                self.activations.disable(f"rank {rank}: {reason}")

    def _permutation_is_exact(self) -> bool:
        rows = self.config.optimizer.batch_size
        ids = np.resize(self.split.ids, rows)
        images = self.split.images.load(ids, np.zeros_like(ids))
        exact = permuted_batch_is_exact(lambda x: self.probe(x, self._cut), images)
        return all(self.world.allgather_object(exact, name="cache.exact"))

    def _mark(self, via: Sequence[int]) -> Fingerprint:
        transform = self.split.images.transform
        cut, size = self._cut, self.config.data.image_size
        shape = self.split.images.pixels.fetch(self.split.ids[:1]).shape[1:]
        return activation_fingerprint(
            prefix=prefix_digest(self.chain, cut),
            cut=cut,
            data=self.split.identity,
            split=self.split.name,
            transform=transform.identity(),
            data_seed=self.config.data_seed,
            augment=str(transform.augment),
            dtype=self.config.cache.cache_dtype,
            input_shape=[shape[0], size or shape[1], size or shape[2]],
            memory_format=MEMORY_FORMAT,
            precision=self.config.optimizer.precision,
            batch_rows=self.config.optimizer.batch_size,
            threads=torch.get_num_threads(),
            via=via if self.config.cache.cache_dtype != "native" else (),
        )


def prefix_digest(chain: Chain, cut: int) -> str:
    """Return a digest of the first `cut` blocks' parameters and buffers."""
    return digest_tensors([*chain.named_parameters(0, cut), *chain.named_buffers(0, cut)])


def rounded_before(history: Sequence[Sequence[int]]) -> list[int]:
    """Return the cuts, ascending, at which rows of the present cut were kept on the way: those that never thawed."""
    via: list[int] = []
    for _, _, cut in history:
        via = [*(earlier for earlier in via if earlier < cut), cut]
    return [cut for cut in via[:-1] if cut > 0]


def open_caching(
    config: Config,
    chain: Chain,
    world: World,
    split: Split,
    *,
    directory: Path,
    clock: PhaseClock,
    run_blocks: Callable[[Tensor, int, int], Tensor],
    budget: Budget,
) -> NoCache | Caching:
    """Return how `split`'s activations are kept; with `--cache auto` and fresh augmentation they are not."""
    rows = config.optimizer.batch_size

    def load(ids: Ids, views: Ids) -> Tensor:
        with clock.within("data"):
            return split.images.load(ids, views)

    def compute(x: Tensor, start: int, stop: int) -> Tensor:
        with clock.within("forward"):
            return run_blocks(x, start, stop)

    cacheable = config.data.cacheable() and (config.data.shuffle == "shard" or config.cache.cache_shared)
    if config.cache.cache == "off" or not cacheable:
        return NoCache(NullActivations(run_blocks=compute, load_images=load, batch_rows=rows))
    activations = PrefixActivations(
        run_blocks=compute,
        load_images=load,
        batch_rows=rows,
        directory=Path(config.cache.cache_dir) if config.cache.cache_dir else directory / "cache",
        shard=f"{world.rank}of{world.size}",
        stored=STORED_TYPES[config.cache.cache_dtype],
        shared=config.cache.cache_shared,
        on_failure="stop" if config.cache.cache_failure == "stop" else "recompute",
        budget=budget,
        owner=str(directory),
        phase=clock.within,
        prefix_digest=lambda cut: prefix_digest(chain, cut),
    )
    return Caching(config, chain, world, split, activations, lambda x, cut: run_blocks(x, 0, cut))
