"""How a run uses the activation cache: what its rows are, when they are kept, and what that saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.compute import Activations, NullActivations, RunBlocks
from hvfreeze.cache.plan import Plan, Situation, make_plan
from hvfreeze.chain.blocks import Chain
from hvfreeze.config.sections import CacheConfig, DataConfig
from hvfreeze.data.batches import Batch
from hvfreeze.data.draws import Ids
from hvfreeze.prefix.measuring import Misses, Outlook, rates_of
from hvfreeze.prefix.splits import Recipe, Split, prefix_digest
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock


class NoCache:
    """`--cache off`: the prefix is computed in every epoch."""

    def __init__(self, activations: NullActivations) -> None:
        self.activations: Activations = activations

    def move(self, cuts: Sequence[int]) -> None:
        """Follow the cut to the last of `cuts`. Collective in `Caching`."""
        self.activations.begin_cut(cuts[-1])

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
    """`--cache on` or `auto`: rows are kept at a cut, and later epochs read them."""

    settings: CacheConfig
    chain: Chain
    world: World
    split: Split
    recipe: Recipe
    shuffled_globally: bool
    activations: PrefixActivations
    outlook: Outlook
    run_blocks: RunBlocks
    misses: Misses
    say: Callable[[str], None]
    exact: bool = True
    predicted: float = 0.0
    saved: float = 0.0
    _cut: int = 0
    _read_before: int = 0

    def move(self, cuts: Sequence[int]) -> None:
        """Follow the cut to the last of `cuts`; rows of the cut before serve until there are new ones.

        Collective: every rank of the world must call this in the same step.
        """
        self._settle()
        self._cut = cuts[-1]
        if self._cut == 0:
            self.activations.begin_cut(0)
            return
        plan = self._plan()
        use = plan.use or self.settings.cache == "on"
        self.predicted += plan.predicted_seconds_saved if use else 0.0

        def begin() -> None:
            mark = self.split.fingerprint(self.chain, cuts, self.recipe)
            universe = self.split.universe()
            self.activations.begin_cut(self._cut, mark=mark, universe=universe, store=use, steady=self.exact)

        together(self.world, begin, name=f"cache.begin.{self.split.name}")
        self._agree_on_failure()
        if use and self.shuffled_globally:
            # No rank knows its own samples beforehand: each computes a fixed share and all read all.
            self.activations.sweep(everything=True)
            self.activations.publish()
            self.world.barrier(name=f"cache.{self.split.name}")
            self.activations.refresh()
        elif use and plan.fill == "sweep":
            self.activations.sweep(everything=True)

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Announce an epoch's batches, and fill in what a partly filled cache lacks where that saves forwards.

        Collective: every rank of the world must call this.
        """
        self._agree_on_failure()
        self.activations.announce([(batch.ids, batch.views) for batch in batches])
        self.activations.sweep()

    def report(self) -> dict[str, Any]:
        """Return summary.json's `cache`, summed over ranks; seconds are a rank's mean.

        Collective: every rank of the world must call this.
        """
        self._settle()
        counters = self.activations.counters
        mine = {
            "bytes": self.activations.stored_bytes,
            "rows_written": counters.rows_written,
            "rows_read": counters.rows_read,
        }
        saved = self.saved - counters.read_seconds - counters.write_seconds
        exact = self.exact and self.activations.exact
        everyone = self.world.allgather_object((mine, exact, saved), name="cache.report")
        return {
            "mode": self.settings.cache,
            "exact": all(theirs for _, theirs, _ in everyone),
            **{key: sum(theirs[key] for theirs, _, _ in everyone) for key in mine},
            "seconds_saved_predicted": self.predicted,
            "seconds_saved": sum(theirs for _, _, theirs in everyone) / self.world.size,
        }

    def _settle(self) -> None:
        """Count what the rows read since the last call would have cost to compute."""
        batches = (self.activations.counters.rows_read - self._read_before) / self.recipe.batch_rows
        self._read_before = self.activations.counters.rows_read
        self.saved += batches * self.misses.seconds_per_batch()

    def _agree_on_failure(self) -> None:
        reasons = self.world.allgather_object(self.activations.failed, name=f"cache.failed.{self.split.name}")
        for rank, reason in enumerate(reasons):
            if reason is not None and self.activations.failed is None:
                self.activations.disable(f"rank {rank}: {reason}")

    def _plan(self) -> Plan:
        """Measure on all ranks, decide on rank 0, and tell all."""
        situation = together(self.world, self._situation, name=f"cache.measure.{self.split.name}")
        situations = self.world.allgather_object(situation, name="cache.situations")
        left = self.outlook.budget.left_bytes
        plan = make_plan(situations, limit_bytes=None if left is None else left * self.world.size)
        plan = self.world.broadcast_object(plan, name="cache.plan")
        if self.split.name == "train":
            self.say(f"cache {self.settings.cache} at cut {self._cut}: {plan.reason}\n{plan.table()}")
        return plan

    def _situation(self) -> Situation:
        rows, cut = self.recipe.batch_rows, self._cut
        ids = np.resize(self.split.ids, rows)
        start = time.perf_counter()
        images = self.split.images.load(ids, np.zeros_like(ids))
        image_seconds = time.perf_counter() - start
        trial = self.outlook.trial(cut, self.run_blocks, images)
        self.exact = self.exact and trial.exact
        self.misses.restart(image_seconds + trial.seconds)
        stored = self.recipe.stored or trial.dtype
        row_bytes = trial.row_elements * stored.itemsize
        training, passes = self.split.name == "train", self.split.passes_per_epoch
        directory, horizon = self.outlook.directory, self.outlook.horizon()
        directory.mkdir(parents=True, exist_ok=True)
        return Situation(
            image_seconds=image_seconds,
            prefix_seconds=trial.seconds,
            suffix_seconds=self.outlook.suffix_seconds() if training else 0.0,
            batch_rows=rows,
            rows=len(self.split.ids),
            views=self.split.num_views,
            row_bytes=row_bytes,
            epochs_left=passes * horizon.epochs_left,
            epochs_until_move=passes * horizon.epochs_until_move,
            memory_bytes=self.outlook.memory_bytes,
            rates=rates_of(directory, row_bytes, rows),
        )


def open_caching(
    settings: CacheConfig,
    data: DataConfig,
    chain: Chain,
    world: World,
    split: Split,
    recipe: Recipe,
    *,
    outlook: Outlook,
    clock: PhaseClock,
    run_blocks: RunBlocks,
    owner: str,
    say: Callable[[str], None],
) -> NoCache | Caching:
    """Return how `split`'s activations are kept; with `--cache auto` and views that never come again they are not.

    Args:
        settings: whether, where and how.
        data: how training samples are shown; in shuffle `global` every rank meets all, and rows can only be shared.
        chain: the model.
        world: the ranks that decide together.
        split: the samples.
        recipe: how rows are computed.
        outlook: what plans need to know.
        clock: told of what training waits for.
        run_blocks: runs frozen blocks.
        owner: names the run; only its own files are ever removed.
        say: tells the user a line; does nothing but on rank 0.
    """
    misses = Misses()

    def load(ids: Ids, views: Ids) -> Tensor:
        with clock.within("data"), misses.timed(batches=0):
            return split.images.load(ids, views)

    def compute(x: Tensor, start: int, stop: int) -> Tensor:
        with clock.within("forward"), misses.timed(batches=1, counts=start == 0):
            return run_blocks(x, start, stop)

    shuffled_globally = data.shuffle == "global"
    if settings.cache == "off" or not data.cacheable() or (shuffled_globally and not settings.cache_shared):
        if settings.cache == "auto" and split.name == "train":
            say("cache auto: off, because with this --augment and --shuffle no row would be read again")
        return NoCache(NullActivations(run_blocks=compute, load_images=load, batch_rows=recipe.batch_rows))
    activations = PrefixActivations(
        run_blocks=compute,
        load_images=load,
        batch_rows=recipe.batch_rows,
        directory=outlook.directory,
        shard=f"{world.rank}of{world.size}",
        stored=recipe.stored,
        shared=settings.cache_shared,
        on_failure="stop" if settings.cache_failure == "stop" else "recompute",
        budget=outlook.budget,
        owner=owner,
        phase=clock.within,
        prefix_digest=lambda cut: prefix_digest(chain, cut),
    )
    return Caching(
        settings, chain, world, split, recipe, shuffled_globally, activations, outlook, run_blocks, misses, say
    )
