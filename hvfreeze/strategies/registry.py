"""The strategies by name, one line each; the class of a strategy's settings has everything else. Imports no torch."""

from __future__ import annotations

from importlib import import_module

from hvfreeze.strategies.settings import StrategyConfig

REGISTERED = (
    "settings:ReplicasConfig",
    "shared_trunk.settings:SharedTrunkConfig",
    "grid.settings:GridConfig",
    "local_sgd.settings:LocalSgdConfig",
    "local_critics.settings:LocalCriticsConfig",
    "stale_ring.settings:StaleRingConfig",
    "subnets.settings:SubnetsConfig",
)


def load(entry: str) -> type[StrategyConfig]:
    """Return the class of a strategy's settings."""
    module, _, name = entry.partition(":")
    kind: type[StrategyConfig] = getattr(import_module(f"hvfreeze.strategies.{module}"), name)
    return kind


STRATEGIES = {kind.strategy: kind for kind in map(load, REGISTERED)}
