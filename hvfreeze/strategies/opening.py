"""Opens the configured strategy, and answers how its ranks form replicas."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from hvfreeze.comm.world import World
from hvfreeze.config.strategy import StrategyConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import rows_at_once
from hvfreeze.strategies.base import BuildContext, Strategy


def open_strategy(context: BuildContext, config: Config) -> Strategy:
    """Return the strategy of the configuration. Collective.

    Raises:
        UsageError: the settings do not fit the model or the world; on all ranks.
    """
    module, _, function = config.strategy.builder.partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), function)(context, config)
    return strategy


def replicas_of(world: World, settings: StrategyConfig) -> int:
    """Return the number of replicas of the ranks: each has its own share of the samples.

    Raises:
        UsageError: the number of ranks does not fit the settings.
    """
    return world.size // settings.ranks_per_replica(world.size)


def reads_images(world: World, settings: StrategyConfig, rank: int) -> bool:
    """Return True if a rank reads images in every epoch, so that it should keep decoded pixels in memory."""
    return settings.reads_images(rank % settings.ranks_per_replica(world.size))


def rows_evaluated(config: Config, shape: Sequence[int]) -> int:
    """Return the number of samples, of model input `shape`, in a batch without training."""
    batch_size = config.optimizer.batch_size
    return rows_at_once(batch_size, shape) if config.strategy.evaluates_more else batch_size
