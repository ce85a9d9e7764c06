"""The strategies by name, one line each; the class of a strategy's settings has everything else. Imports no torch."""

from __future__ import annotations

from importlib import import_module

from hvfreeze.config.strategy import StrategyConfig

REGISTERED = (
    "hvfreeze.config.strategy:ReplicasConfig",
    "hvfreeze.strategies.shared_trunk.settings:SharedTrunkConfig",
    "hvfreeze.strategies.grid.settings:GridConfig",
    "hvfreeze.strategies.local_sgd.settings:LocalSgdConfig",
    "hvfreeze.strategies.local_critics.settings:LocalCriticsConfig",
    "hvfreeze.strategies.stale_ring.settings:StaleRingConfig",
    "hvfreeze.strategies.subnets.settings:SubnetsConfig",
)


def load(entry: str) -> type[StrategyConfig]:
    """Return the class of a strategy's settings."""
    module, _, name = entry.partition(":")
    kind: type[StrategyConfig] = getattr(import_module(module), name)
    return kind


STRATEGIES = {kind.strategy: kind for kind in map(load, REGISTERED)}
