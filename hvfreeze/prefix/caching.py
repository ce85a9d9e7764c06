"""How a run uses the activation cache: what its rows are, when they are kept, and what that saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.compute import Activations, LoadImages, NullActivations, RunBlocks
from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import prepare_directory
from hvfreeze.cache.file.names import refusals
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.chain.blocks import Chain
from hvfreeze.config.sections import CacheConfig, DataConfig
from hvfreeze.data.batches import Batch
from hvfreeze.data.draws import Ids
from hvfreeze.prefix.account import Account, summary_of
from hvfreeze.prefix.measuring import Misses, Outlook
from hvfreeze.prefix.planning import Planner
from hvfreeze.prefix.splits import Recipe, Split, prefix_digest
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock

NOTHING_KEPT: dict[str, Any] = {
    "mode": "off",
    "exact": True,
    "bytes": 0,
    "rows_written": 0,
    "rows_read": 0,
    "rows_read_predicted": 0.0,
    "seconds_saved_predicted": 0.0,
    "seconds_saved": 0.0,
    "stays": [],
}
"""summary.json's `cache` of a run without one."""


class NoCache:
    """`--cache off`: the prefix is computed in every epoch."""

    def __init__(self, activations: NullActivations) -> None:
        self.activations: Activations = activations

    def move(self, cuts: Sequence[int]) -> None:
        """Follow the cut to the last of `cuts`. Collective in `Caching`."""
        self.activations.begin_cut(cuts[-1])

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Do nothing. Collective in `Caching`."""

    @property
    def keeps(self) -> bool:
        """Return False."""
        return False

    def report(self) -> dict[str, Any]:
        """Return summary.json's `cache`. Collective in `Caching`."""
        return dict(NOTHING_KEPT)


@dataclass
class Caching:
    """`--cache on` or `auto`: rows are kept at a cut, and later epochs read them."""

    settings: CacheConfig
    chain: Chain
    world: World
    split: Split
    recipe: Recipe
    shared: bool
    """Whether no rank knows its own samples beforehand, so that each stores a fixed share and all read all."""
    digest: Callable[[int], str]
    """Cut -> digest of the prefix."""
    activations: PrefixActivations
    planner: Planner
    account: Account
    say: Callable[[str], None]
    _cut: int = 0
    _mark: Fingerprint | None = None
    _declined: bool = False
    _told: set[str] = field(default_factory=set)

    def move(self, cuts: Sequence[int]) -> None:
        """Follow the cut to the last of `cuts`; rows of the cut before serve until there are new ones.

        Collective: every rank of the world must call this in the same step.

        Raises:
            CacheFault: something is wrong with the cache, and --cache-failure is `stop`; on all ranks.
        """
        self.account.settle(self.activations.cut)
        self._agree_on_failure()
        self._cut, self._declined = cuts[-1], False
        if self._cut == 0 or self.activations.failed is not None:
            self.activations.begin_cut(self._cut)
            return
        self._mark = self.split.fingerprint(self.chain, cuts, self.recipe, prefix=self.digest(self._cut))
        self._consider()

    @property
    def keeps(self) -> bool:
        """Whether rows of the current cut are kept. Not a collective."""
        return self._cut > 0 and not self._declined and self.activations.failed is None

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Announce an epoch's batches, and fill in what a partly filled cache lacks where that saves forwards.

        A cut whose rows are not kept is looked at again: it may have stayed for longer than was to be expected.
        Collective: every rank of the world must call this.
        """
        self._agree_on_failure()
        if self._declined and self.activations.failed is None:
            self._consider(again=True)
        self.activations.announce([(batch.ids, batch.views) for batch in batches])
        self.activations.sweep()

    def _consider(self, *, again: bool = False) -> None:
        """Plan, and begin to keep the rows of this cut where that pays or was asked for. Collective."""
        mark, universe, cut = self._mark, self.split.universe(), self._cut
        assert mark is not None
        try:
            asked = self.settings.cache == "on"
            plan = self.planner.plan(self._cut, lambda epochs: self.activations.shares(mark, cut, epochs), asked=asked)
        except CacheFault as fault:
            if self.settings.cache_failure == "stop":
                raise
            self.activations.disable(str(fault), told=self.world.rank > 0)
            self.activations.begin_cut(self._cut)
            return
        use = plan.use or self.settings.cache == "on"
        self._declined = not use
        if again and not use:
            return
        if self.split.name == "train":
            when = ", looked at again" if again else ""
            decided = f"cache {self.settings.cache} at cut {self._cut}{when}: {plan.reason}"
            self.say(f"{decided}; log.txt has the table\n{plan.table()}" if len(plan.rows) > 1 else decided)
        self.account.settle(self.activations.cut)
        self.account.begin(self._cut, plan, kept=use)

        def begin() -> None:
            steady = self.planner.steady
            self.activations.begin_cut(self._cut, mark=mark, universe=universe, store=use, steady=steady)

        together(self.world, begin, name=f"cache.begin.{self.split.name}")
        self._agree_on_failure()
        if use and self.activations.failed is None:
            self._tell_refusals(mark)
        if use and self.activations.failed is None and self.shared:
            self._fill()
        elif not again:
            # What is left of the epoch under way, should the cut have moved in its middle.
            self.activations.sweep()

    def _fill(self) -> None:
        """Compute rows before training goes on, of which each rank stores a share and all read all. Collective."""
        self.activations.sweep(everything=True)
        self.activations.publish()
        self.world.barrier(name=f"cache.{self.split.name}")
        self.activations.refresh()
        # Each file is hashed once by all ranks together: reading is everybody's, and hashing takes as long.
        mine = self.activations.verify_share(self.world.rank, self.world.size)
        theirs = self.world.allgather_object(mine, name=f"cache.verified.{self.split.name}")
        self.activations.accept({name: digest for verified in theirs for name, digest in verified.items()})
        self._agree_on_failure()

    def _tell_refusals(self, mark: Fingerprint) -> None:
        """Say which files of this cut are not used, and why; each once."""
        if self.world.rank == 0 and self.activations.stored_bytes == 0:
            for line in refusals(self.activations.directory, mark):
                if line not in self._told:
                    self._told.add(line)
                    self.say(line)

    def report(self) -> dict[str, Any]:
        """Return summary.json's `cache`, summed over ranks; seconds are a rank's mean.

        Collective: every rank of the world must call this.
        """
        self.account.settle(self.activations.cut)
        counters, exact = self.activations.counters, self.planner.exact and self.activations.exact
        mine = (exact, self.activations.stored_bytes, counters.rows_written, self.account.of_stays())
        every_exact, every_bytes, every_written, done = zip(*self.world.allgather_object(mine, name="cache.report"))
        return {
            "mode": self.settings.cache,
            "exact": all(every_exact),
            "bytes": sum(every_bytes),
            "rows_written": sum(every_written),
            **summary_of(self.account.stays, done),
        }

    def _agree_on_failure(self) -> None:
        reasons = self.world.allgather_object(self.activations.failed, name=f"cache.failed.{self.split.name}")
        for rank, reason in enumerate(reasons):
            if reason is not None and self.activations.failed is None:
                self.activations.disable(f"rank {rank}: {reason}", told=True)


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
    load_images: LoadImages | None = None,
    digest: Callable[[int], str] | None = None,
    shared: bool = False,
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
        load_images: what rows are computed from; None is the split's images.
        digest: cut -> digest of the prefix; None is that of the chain, all of whose blocks are here.
        shared: samples of `split` are met by other ranks too, which read what this one stores.

    Collective: every rank of `world` must call this.

    Raises:
        CacheFault: the cache directory of some rank cannot be used; on all ranks.
    """
    misses = Misses()

    def load(ids: Ids, views: Ids) -> Tensor:
        with clock.within("data"), misses.loading():
            return (load_images or split.images.load)(ids, views)

    def compute(x: Tensor, start: int, stop: int) -> Tensor:
        with clock.within("forward"), misses.running(start, stop):
            return run_blocks(x, start, stop)

    shuffled_globally = data.shuffle == "global"
    if settings.cache == "off" or not data.cacheable() or (shuffled_globally and not settings.cache_shared):
        if settings.cache == "auto" and split.name == "train":
            say("cache auto: off, because with this --augment and --shuffle no row would be read again")
        return NoCache(NullActivations(run_blocks=compute, load_images=load, batch_rows=recipe.batch_rows))
    # Now, and not hours later at the first cut: a directory that cannot be used is the user's to change.
    private = not settings.cache_shared
    prepare = partial(prepare_directory, outlook.directory, private=private)
    together(world, prepare, name=f"cache.directory.{split.name}")
    shared, digest = shared or shuffled_globally, digest or partial(prefix_digest, chain)
    activations = PrefixActivations(
        run_blocks=compute,
        load_images=load,
        batch_rows=recipe.batch_rows,
        directory=outlook.directory,
        shard=f"{world.rank}of{world.size}",
        stored=recipe.stored,
        shared=shared,
        private=private,
        on_failure="stop" if settings.cache_failure == "stop" else "recompute",
        budget=outlook.budget,
        owner=owner,
        phase=clock.within,
        prefix_digest=digest,
    )
    account = Account(misses, activations.counters)
    planner = Planner(world, split, recipe, outlook, run_blocks, misses, all_at_once=shared)
    return Caching(settings, chain, world, split, recipe, shared, digest, activations, planner, account, say)
