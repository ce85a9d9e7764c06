"""What the settings of a strategy come to in a world of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from hvfreeze.comm.world import World
from hvfreeze.config.section import StrategyConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import rows_at_once
from hvfreeze.strategies.base import BuildContext, Strategy


def open_strategy(context: BuildContext, config: Config) -> Strategy:
    """Return the strategy that the configuration has chosen. Collective.

    Raises:
        UsageError: the settings do not fit the model or the world; on all ranks.
    """
    module, _, function = config.strategy.builder.partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), function)(context, config)
    return strategy


def replicas_of(world: World, settings: StrategyConfig) -> int:
    """Return how many replicas the ranks form: each has its own share of the samples.

    Raises:
        UsageError: the number of ranks does not fit the settings.
    """
    return world.size // settings.ranks_per_replica(world.size)


def reads_images(world: World, settings: StrategyConfig, rank: int) -> bool:
    """Tell whether a rank reads images in every epoch, and should keep their pixels where there is room."""
    return settings.reads_images(rank % settings.ranks_per_replica(world.size))


def rows_evaluated(config: Config, shape: Sequence[int]) -> int:
    """Return how many samples, of `shape` as the model sees them, a batch that trains nothing has."""
    batch_size = config.optimizer.batch_size
    return rows_at_once(batch_size, shape) if config.strategy.evaluates_more else batch_size
