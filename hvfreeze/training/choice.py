"""From --strategy to what opens it; a strategy's file is imported when it is asked for, and only then."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from hvfreeze.config.strategy import StrategyConfig
from hvfreeze.config.tree import Config
from hvfreeze.errors import UsageError
from hvfreeze.ranks.world import World
from hvfreeze.strategies.strategy import Materials, Strategy


@dataclass(frozen=True)
class Choice:
    """What must be known of a strategy before it is opened."""

    opener: str
    """module:function; the function takes the materials and the configuration. A collective."""
    ranks_per_replica: Callable[[StrategyConfig, World], int]
    """How many neighbouring ranks work on one batch together, as one replica."""
    reads_images: Callable[[StrategyConfig, int], bool] = lambda settings, place: True
    """Whether the rank at this place in its replica is the one, or one of those, that keep pixels in memory."""


CHOICES = {
    "replicas": Choice("hvfreeze.strategies.replicas.opening:open_replicas", lambda settings, world: 1),
    "shared-trunk": Choice(
        "hvfreeze.strategies.shared_trunk.opening:open_shared_trunk",
        lambda settings, world: world.size,
        lambda settings, place: place == 0 or settings.trunk == "whole",
    ),
    "grid": Choice(
        "hvfreeze.strategies.grid.opening:open_grid",
        lambda settings, world: settings.grid_parts(world.size),
        lambda settings, place: place == 0 or settings.redeals,
    ),
}


def place_of(world: World, settings: StrategyConfig) -> tuple[int, int]:
    """Return which replica this rank belongs to, and how many there are: each has its own share of the samples.

    Raises:
        UsageError: the ranks cannot form whole replicas.
    """
    name = settings.strategy
    ranks = CHOICES[name].ranks_per_replica(settings, world)
    if world.size % ranks:
        raise UsageError(
            f"--strategy ({name}): {world.size} ranks do not form replicas of {ranks} each; start a multiple of {ranks}"
        )
    return world.rank // ranks, world.size // ranks


def reads_images(world: World, settings: StrategyConfig) -> bool:
    """Tell whether this rank reads images in every epoch, and should keep their pixels where there is room."""
    choice = CHOICES[settings.strategy]
    return choice.reads_images(settings, world.rank % choice.ranks_per_replica(settings, world))


def open_strategy(materials: Materials, config: Config) -> Strategy:
    """Return the strategy that `config` names, one of `CHOICES`, ready for its first epoch.

    Collective: every rank of the materials' world must call this.

    Raises:
        UsageError: the strategy does not fit the model, the world or the settings; on all ranks.
    """
    module, _, function = CHOICES[config.strategy.strategy].opener.partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), function)(materials, config)
    return strategy
