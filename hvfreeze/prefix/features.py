"""The two parts of a chain in a step: the frozen prefix, whose output is computed or cached, and the trained suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import prepare_directory
from hvfreeze.cache.file.reader import refusals
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.comm.agreement import gather_results, raise_on_all_ranks, synchronize_in_rounds
from hvfreeze.comm.world import World
from hvfreeze.config.cache import CacheConfig
from hvfreeze.config.data import DataConfig
from hvfreeze.data.batches import Batch, announce
from hvfreeze.data.decoding import Inputs
from hvfreeze.data.shards import Ids
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_precision
from hvfreeze.prefix.cache_decision import Account, CostInputs, Planner, PrefixTimer
from hvfreeze.prefix.splits import Recipe, RowSource, Split, prefix_digest
from hvfreeze.runs.clock import PhaseClock


@dataclass(frozen=True)
class Halves:
    """Runs the blocks before and behind a cut, in the run's precision."""

    chain: Chain
    precision: str = "float32"

    def prefix(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of frozen blocks start..stop-1 for `x`, without gradient."""
        with torch.no_grad(), in_precision(self.precision):
            return self.chain.run(x, start, stop)

    def suffix(self, features: Tensor, cut: int) -> Tensor:
        """Return the logits, (B, classes), of the blocks from `cut` on, with gradients if enabled."""
        return self.part(features, cut, len(self.chain.blocks))

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of blocks start..stop-1 for `x`, with gradients if enabled."""
        with in_precision(self.precision):
            return self.chain.run(x, start, stop)

    def be_in_mode(self, *, training: bool) -> None:
        """Set the model to training or evaluation mode; frozen blocks stay in evaluation mode."""
        # Walking through all modules costs as much as a small one of them.
        if self.chain.model.training != training:
            self.chain.model.train(training)

    def rows_of(self, split: Split, recipe: Recipe) -> RowSource:
        """Return the rows of `split` for a rank that has all blocks."""
        return RowSource(
            split=split,
            recipe=recipe,
            chain=self.chain,
            digest=partial(prefix_digest, self.chain),
            load_images=split.images.load,
            run_blocks=self.prefix,
        )


@dataclass(frozen=True, kw_only=True)
class CacheTerms:
    """The settings and services that caching uses, for every split."""

    settings: CacheConfig
    """The cache settings."""
    data: DataConfig
    """The settings of training views."""
    mixed: bool
    """Whether ranks train on each other's samples, so that rows must be shared."""
    world: World
    """The ranks that decide together."""
    costs: CostInputs
    owner: str
    """The run's name; only its own files are ever removed."""
    say: Callable[[str], None]
    """Logs a line for the user; does nothing except on rank 0."""

    @property
    def cacheable(self) -> bool:
        """Whether caching is possible: it is enabled, and rows are used again by ranks that can read them."""
        reachable = not self.mixed or self.settings.cache_shared
        return self.settings.cache != "off" and self.data.cacheable() and reachable


NOTHING_KEPT: dict[str, Any] = {
    "mode": "off",
    "exact": True,
    "bytes": 0,
    "rows_written": 0,
    "rows_read": 0,
    "seconds_saved_predicted": 0.0,
    "seconds_saved": 0.0,
}
"""The entry `cache` of summary.json for a run without cache."""


@dataclass
class Features:
    """The output of the frozen prefix for the batches of one split, read from the cache if possible."""

    images: Inputs
    activations: PrefixActivations
    terms: CacheTerms
    source: RowSource
    account: Account
    planner: Planner | None
    """None: the prefix is computed in every epoch."""
    _fingerprint: Fingerprint | None = None
    _declined: bool = False
    _told: set[str] = field(default_factory=set)

    @property
    def cut(self) -> int:
        """Number of frozen blocks."""
        return self.activations.cut

    @property
    def keeps(self) -> bool:
        """Whether rows of the current cut are stored. Not a collective."""
        kept = self.planner is not None and self.activations.failed is None
        return kept and self._fingerprint is not None and not self._declined

    def move(self, cuts: Sequence[int]) -> None:
        """Change to the last of `cuts`; rows of the previous cut are used until there are new ones. Collective.

        Rounded rows depend on all cuts of the run.

        Raises:
            CacheFault: the cache cannot be used, and --cache-failure is `stop`; on all ranks.
        """
        cut = cuts[-1]
        if self.planner is None:
            self.activations.begin_cut(cut)
            return
        self.account.settle(self.cut)
        self._agree_on_failure()
        self._fingerprint, self._declined = None, False
        if cut == 0 or self.activations.failed is not None:
            self.activations.begin_cut(cut)
            return
        self._fingerprint = self.source.fingerprint(cuts)
        self._consider(self.planner, cut, self._fingerprint)

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Announce an epoch's batches, and compute missing rows of a partly filled cache if that saves forward passes.

        Caching is decided again at a cut whose rows are not stored, because it may have stayed longer than expected.
        Collective.
        """
        if self.planner is not None:
            self._prepare(self.planner, batches)
            self._sweep()
        announce(self.images, batches)

    def beginning_epoch(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Do as `begin_epoch` on a rank that decides alone, and yield after each forward pass. Not a collective.

        The caller must exhaust the iterator.
        """
        if self.planner is not None:
            self._prepare(self.planner, batches)
            yield from self.activations.sweeping()
        announce(self.images, batches)

    def expect(self, batches: Sequence[Batch]) -> None:
        """Prefetch these batches, in order, instead of those announced before. Not a collective."""
        self._announce(batches)
        announce(self.images, batches)

    def of(self, batch: Batch) -> Tensor:
        """Return the features of a batch, (B, ...); with cut 0 the images themselves."""
        return self.activations.get(batch.ids, batch.views, counted=batch.counted)

    def report(self) -> dict[str, Any]:
        """Return the entry `cache` of summary.json: sums over ranks, mean seconds per rank. Collective."""
        if self.planner is None:
            return dict(NOTHING_KEPT)
        self.account.settle(self.cut)
        activations, account = self.activations, self.account
        exact = self.planner.exact and activations.exact
        local = (exact, activations.stored_bytes, activations.counters.rows_written, account.rows_read)
        ranks = self.terms.world.allgather_object((*local, account.seconds_saved), name="cache.report")
        exacts, sizes, written, read, saved = zip(*ranks)
        return {
            "mode": self.terms.settings.cache,
            "exact": all(exacts),
            "bytes": sum(sizes),
            "rows_written": sum(written),
            "rows_read": sum(read),
            "seconds_saved_predicted": account.seconds_saved_predicted,
            "seconds_saved": sum(saved) / len(saved),
        }

    def close(self) -> None:
        """Publish the cached rows and close all files."""
        self.activations.close()

    def _prepare(self, planner: Planner, batches: Sequence[Batch]) -> None:
        """Announce an epoch's batches, after deciding again at a cut whose rows are not stored. Collective."""
        self._agree_on_failure()
        if self._declined and self._fingerprint is not None and self.activations.failed is None:
            self._consider(planner, self.cut, self._fingerprint, again=True)
        self._announce(batches)

    def _announce(self, batches: Sequence[Batch]) -> None:
        self.activations.announce([(batch.ids, batch.views) for batch in batches])

    def _consider(self, planner: Planner, cut: int, fingerprint: Fingerprint, *, again: bool = False) -> None:
        """Decide whether to cache, and start to store rows of this cut if that pays or was requested. Collective."""
        settings, world, split = self.terms.settings, self.terms.world, self.source.split
        asked = settings.cache == "on"
        try:
            plan = planner.plan(cut, lambda epochs: self.activations.shares(fingerprint, cut, epochs), asked=asked)
        except CacheFault as fault:
            if settings.cache_failure == "stop":
                raise
            self.activations.disable(str(fault), told=world.rank > 0)
            self.activations.begin_cut(cut)
            return
        use = plan.use or asked
        self._declined = not use
        if again and not use:
            return
        if split.name == "train":
            when = ", decided again" if again else ""
            decided = f"cache {settings.cache} at cut {cut}{when}: {plan.reason}"
            self.terms.say(f"{decided}; the table is in log.txt\n{plan.table()}" if len(plan.rows) > 1 else decided)
        self.account.settle(self.cut)
        self.account.seconds_saved_predicted += plan.seconds_saved

        def begin() -> str | None:
            self.activations.begin_cut(
                cut,
                fingerprint=fingerprint,
                owned_keys=split.owned_keys(),
                store=use,
                batch_invariant=planner.batch_invariant,
            )
            return self.activations.failed

        self._fail_with(gather_results(world, begin, name=f"cache.begin.{split.name}"))
        if use and self.activations.failed is None:
            self._log_refusals(fingerprint)
        if use and self.activations.failed is None and self.source.shared:
            self._fill()
        elif not again:
            # The rest of the epoch under way, should the cut have moved in its middle.
            self._sweep()

    def _sweep(self, *, everything: bool = False) -> None:
        """Compute missing rows, of which one rank may have all and others none; see `sweep`. Collective."""
        sweeping = self.activations.sweeping(everything=everything)
        synchronize_in_rounds(self.terms.world, sweeping, name=f"cache.{self.source.split.name}")

    def _fill(self) -> None:
        """Compute rows before training continues; each rank stores a share, and all read all. Collective."""
        world, name = self.terms.world, self.source.split.name
        self._sweep(everything=True)
        self.activations.publish()
        world.barrier(name=f"cache.{name}")
        self.activations.refresh()
        # Each file is hashed once by all ranks together: reading is everybody's, and hashing takes as long.
        local = self.activations.verify_share(world.rank, world.size)
        theirs = world.allgather_object(local, name=f"cache.verified.{name}")
        self.activations.accept({name: digest for verified in theirs for name, digest in verified.items()})
        self._agree_on_failure()

    def _log_refusals(self, fingerprint: Fingerprint) -> None:
        """Log which files of this cut are not used, and why, each once."""
        if self.terms.world.rank == 0 and self.activations.stored_bytes == 0:
            for line in refusals(self.terms.costs.directory, fingerprint):
                if line not in self._told:
                    self._told.add(line)
                    self.terms.say(line)

    def _agree_on_failure(self) -> None:
        name = f"cache.failed.{self.source.split.name}"
        self._fail_with(self.terms.world.allgather_object(self.activations.failed, name=name))

    def _fail_with(self, reasons: Sequence[str | None]) -> None:
        """Stop caching if a rank has a reason (by rank number). Not a collective."""
        for rank, reason in enumerate(reasons):
            if reason is not None and self.activations.failed is None:
                self.activations.disable(f"rank {rank}: {reason}", told=True)


def open_features(terms: CacheTerms, source: RowSource, *, clock: PhaseClock) -> Features:
    """Return the features whose rows `source` computes; `clock` measures the waiting time of training. Collective.

    With `--cache auto`, nothing is cached if views never repeat.

    Raises:
        CacheFault: the cache directory of some rank cannot be used; on all ranks.
    """
    timer, settings, split, recipe = PrefixTimer(), terms.settings, source.split, source.recipe

    def load(ids: Ids, views: Ids) -> Tensor:
        with clock.within("data"), timer.loading():
            return source.load_images(ids, views)

    def compute(x: Tensor, start: int, stop: int) -> Tensor:
        with clock.within("forward"), timer.running(start, stop):
            return source.run_blocks(x, start, stop)

    if not terms.cacheable:
        plain = PrefixActivations(run_blocks=compute, load_images=load, batch_rows=recipe.batch_rows)
        return Features(split.images, plain, terms, source, Account(timer, plain.counters), planner=None)
    # Check the directory now. The first cut may come hours later, and the user must choose another directory.
    # The default directory is in the run directory, is first created here, and is always private.
    private = settings.cache_dir is None or not settings.cache_shared
    prepare = partial(prepare_directory, terms.costs.directory, private=private)
    raise_on_all_ranks(terms.world, prepare, name=f"cache.directory.{split.name}")
    source = replace(source, shared=source.shared or terms.mixed)
    activations = PrefixActivations(
        run_blocks=compute,
        load_images=load,
        batch_rows=recipe.batch_rows,
        directory=terms.costs.directory,
        shard=f"{terms.world.rank}of{terms.world.size}",
        stored=recipe.stored,
        shared=source.shared,
        private=not settings.cache_shared,
        on_failure="stop" if settings.cache_failure == "stop" else "recompute",
        budget=terms.costs.budget,
        owner=terms.owner,
        phase=clock.within,
        prefix_digest=source.digest,
    )
    account, planner = Account(timer, activations.counters), Planner(terms.world, source, terms.costs, timer)
    return Features(split.images, activations, terms, source, account, planner)
