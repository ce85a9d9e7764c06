"""The strategies by name, and what must be known of one before it is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvfreeze.comm.world import World
from hvfreeze.config.sections import StrategyConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import rows_at_once


@dataclass(frozen=True)
class Choice:
    """What must be known of a strategy before it is opened."""

    builder: str
    """module:function, imported when it is asked for: (context, configuration) -> strategy. A collective."""
    ranks_per_replica: Callable[[StrategyConfig, World], int]
    """How many neighbouring ranks work on one batch together, as one replica: a divisor of the number of ranks."""
    reads_images: Callable[[StrategyConfig, int], bool] = lambda settings, place: True
    """Whether the rank at this place in its replica is the one, or one of those, that keep pixels in memory."""
    takes_any: bool = False
    """Whether its batches that train nothing may have more samples than those that train."""


CHOICES = {
    "replicas": Choice(
        "hvfreeze.strategies.data_parallel:open_data_parallel", lambda settings, world: 1, takes_any=True
    ),
    "shared-trunk": Choice(
        "hvfreeze.strategies.shared_trunk.build:open_shared_trunk",
        lambda settings, world: world.size,
        lambda settings, place: place == 0 or settings.trunk == "whole",
    ),
    "grid": Choice(
        "hvfreeze.strategies.grid.build:open_grid",
        lambda settings, world: settings.grid_parts(world.size),
        lambda settings, place: place == 0 or settings.redeals,
    ),
    "local-sgd": Choice("hvfreeze.strategies.local_sgd:open_local_sgd", lambda settings, world: 1, takes_any=True),
    "stale-ring": Choice(
        "hvfreeze.strategies.stale_ring.build:open_stale_ring",
        lambda settings, world: settings.ring_parts(world.size) - 1,
        lambda settings, place: place == 0,
    ),
    "local-critics": Choice(
        "hvfreeze.strategies.local_critics.build:open_local_critics",
        lambda settings, world: world.size,
        lambda settings, place: place == 0,
    ),
    "subnets": Choice("hvfreeze.strategies.subnets.strategy:open_subnets", lambda settings, world: 1, takes_any=True),
}


def replicas_of(world: World, settings: StrategyConfig) -> int:
    """Return how many replicas the ranks form: each has its own share of the samples.

    Raises:
        UsageError: the number of ranks does not fit --parts or --replicas.
    """
    return world.size // CHOICES[settings.strategy].ranks_per_replica(settings, world)


def reads_images(world: World, settings: StrategyConfig, rank: int) -> bool:
    """Tell whether a rank reads images in every epoch, and should keep their pixels where there is room."""
    choice = CHOICES[settings.strategy]
    return choice.reads_images(settings, rank % choice.ranks_per_replica(settings, world))


def rows_evaluated(config: Config, shape: Sequence[int]) -> int:
    """Return how many samples, of `shape` as the model sees them, a batch that trains nothing has."""
    batch_size = config.optimizer.batch_size
    return rows_at_once(batch_size, shape) if CHOICES[config.strategy.strategy].takes_any else batch_size
