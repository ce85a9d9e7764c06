"""Opens the cache of a split: on a run's terms, for rows from some source, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.compute import NullActivations
from hvfreeze.cache.file.disk import prepare_directory
from hvfreeze.config.sections import CacheConfig, DataConfig
from hvfreeze.data.draws import Ids
from hvfreeze.prefix.account import Account
from hvfreeze.prefix.caching import Caching, NoCache
from hvfreeze.prefix.measuring import Misses, Outlook
from hvfreeze.prefix.planning import Planner
from hvfreeze.prefix.splits import RowSource
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock


@dataclass(frozen=True, kw_only=True)
class CacheTerms:
    """On what terms a run caches, whichever split it is."""

    settings: CacheConfig
    """Whether, where and how."""
    data: DataConfig
    """How training samples are shown; in shuffle `global` every rank meets all, and rows can only be shared."""
    world: World
    """The ranks that decide together."""
    outlook: Outlook
    """What plans need to know."""
    owner: str
    """Names the run; only its own files are ever removed."""
    say: Callable[[str], None]
    """Tells the user a line; does nothing but on rank 0."""

    @property
    def shuffled_globally(self) -> bool:
        """Whether no rank knows its own samples beforehand."""
        return self.data.shuffle == "global"

    @property
    def cacheable(self) -> bool:
        """Whether rows may be kept: it is asked for, and rows are met again by ranks that can read them."""
        reachable = not self.shuffled_globally or self.settings.cache_shared
        return self.settings.cache != "off" and self.data.cacheable() and reachable


def open_caching(terms: CacheTerms, source: RowSource, *, clock: PhaseClock) -> NoCache | Caching:
    """Return how the rows of `source` are kept; with `--cache auto` and views that never come again they are not.

    Args:
        terms: the run's.
        source: what rows are, and what computes them.
        clock: told of what training waits for.

    Collective: every rank of the terms' world must call this.

    Raises:
        CacheFault: the cache directory of some rank cannot be used; on all ranks.
    """
    misses, settings, name = Misses(), terms.settings, source.split.name
    timed = timed_source(source, clock, misses)
    if not terms.cacheable:
        if settings.cache == "auto" and name == "train":
            terms.say("cache auto: off, because with this --augment and --shuffle no row would be read again")
        rows = source.recipe.batch_rows
        return NoCache(NullActivations(run_blocks=timed.run_blocks, load_images=timed.load_images, batch_rows=rows))
    # Now, and not hours later at the first cut: a directory that cannot be used is the user's to change.
    # Without a directory of its own the cache lies in the run's, which is made here first and is always private.
    private = settings.cache_dir is None or not settings.cache_shared
    prepare = partial(prepare_directory, terms.outlook.directory, private=private)
    together(terms.world, prepare, name=f"cache.directory.{name}")
    source = replace(source, shared=source.shared or terms.shuffled_globally)
    activations = PrefixActivations(
        run_blocks=timed.run_blocks,
        load_images=timed.load_images,
        batch_rows=source.recipe.batch_rows,
        directory=terms.outlook.directory,
        shard=f"{terms.world.rank}of{terms.world.size}",
        stored=source.recipe.stored,
        shared=source.shared,
        private=not settings.cache_shared,
        on_failure="stop" if settings.cache_failure == "stop" else "recompute",
        budget=terms.outlook.budget,
        owner=terms.owner,
        phase=clock.within,
        prefix_digest=source.digest,
    )
    account = Account(misses, activations.counters)
    planner = Planner(terms.world, source, terms.outlook, misses)
    return Caching(settings, terms.world, source, activations, planner, account, terms.say)


def timed_source(source: RowSource, clock: PhaseClock, misses: Misses) -> RowSource:
    """Return `source`, but the seconds that it takes to compute a row are told to the clock and to `misses`."""

    def load(ids: Ids, views: Ids) -> Tensor:
        with clock.within("data"), misses.loading():
            return source.load_images(ids, views)

    def compute(x: Tensor, start: int, stop: int) -> Tensor:
        with clock.within("forward"), misses.running(start, stop):
            return source.run_blocks(x, start, stop)

    return replace(source, load_images=load, run_blocks=compute)
