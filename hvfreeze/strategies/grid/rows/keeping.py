"""Opens the cache of one split where its rows are read, for the line that a rank is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hvfreeze.config.tree import Config
from hvfreeze.errors import UsageError
from hvfreeze.prefix.features import Features
from hvfreeze.prefix.measuring import Outlook
from hvfreeze.prefix.opening import CacheTerms, open_caching
from hvfreeze.prefix.splits import Recipe, RowSource, Split
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.caching import open_outlook
from hvfreeze.strategies.grid.dealing.deal import Deal
from hvfreeze.strategies.grid.dealing.holding import Holding
from hvfreeze.strategies.grid.facts import Facts
from hvfreeze.strategies.grid.rows.errands import Errands
from hvfreeze.strategies.strategy import Materials


class Keeper:
    """What caches are opened with; both splits pay from one budget."""

    def __init__(self, materials: Materials, config: Config) -> None:
        self._materials, self._config = materials, config
        self._outlook: tuple[Deal, Outlook] | None = None

    def open(
        self,
        name: str,
        clock: PhaseClock,
        holding: Holding,
        errands: Errands,
        *,
        digest: Callable[[int], str],
        say: Callable[[str], None],
    ) -> Features:
        """Return the cache of split `name`, `train` or `test`, for this rank's line.

        Where lines share a replica's samples, each stores a part and all read all.
        Collective among the ranks of this rank's partition, all of whom must call this.
        """
        config, split, rows = self._config, self._split(name, holding), self._config.optimizer.batch_size
        if name == "train":
            rows //= holding.facts.micro_batches
        source = RowSource(
            split=split,
            recipe=Recipe(batch_rows=rows, precision=config.optimizer.precision, kept_as=config.cache.cache_dtype),
            chain=holding.chain,
            digest=digest,
            load_images=lambda ids, views: errands.load(split.images, ids, views),
            run_blocks=errands.run,
            shared=name == "train" and holding.lines > 1,
        )
        terms = CacheTerms(
            settings=config.cache,
            data=config.data,
            world=holding.mesh.replica_world,
            outlook=replace(self._outlook_of(holding), _trials={}),
            owner=str(self._materials.directory),
            say=say,
        )
        return Features(split.images, open_caching(terms, source, clock=clock))

    def _split(self, name: str, holding: Holding) -> Split:
        if name == "train":
            split = self._materials.trained()
            return replace(split, ids=split.ids[holding.line :: holding.lines])
        split = self._materials.tested(passes_per_epoch=1 / self._config.run.evaluate_every)
        # Lines share evaluation samples by whole batches.
        batches = np.arange(len(split.ids)) // self._config.optimizer.batch_size
        return replace(split, ids=split.ids[batches % holding.lines == holding.line])

    def _outlook_of(self, holding: Holding) -> Outlook:
        if self._outlook is None or self._outlook[0] != holding.deal:
            config, size = self._config, holding.mesh.replicas
            outlook = open_outlook(self._materials, config.cache, config.optimizer, holding.freezer, size=size)
            self._outlook = holding.deal, outlook
        return self._outlook[1]


def keeps_rows(config: Config, facts: Facts, world: World) -> bool:
    """Tell whether rows may be cached; equal on all ranks.

    Raises:
        UsageError: settings do not fit each other.
    """
    settings, rows = config.cache, config.optimizer.batch_size
    if settings.cache == "off" or not config.data.cacheable():
        return False
    if facts.redeals and world.local_size < world.size and not settings.cache_shared:
        raise UsageError(
            "--redeal (on) must be used with --cache off or --cache-shared on several nodes: ranks read rows that "
            "others have stored"
        )
    if rows % facts.micro_batches == 0:
        return True
    if settings.cache == "on":
        raise UsageError(
            f"--micro-batches ({facts.micro_batches}) must divide --batch-size ({rows}) with --cache on: rows are "
            "computed in batches of one size"
        )
    return False
