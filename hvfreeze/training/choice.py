"""From --strategy to what opens it; a strategy's file is imported when it is asked for, and only then."""

from __future__ import annotations

import importlib

from hvfreeze.config.tree import Config
from hvfreeze.strategies.strategy import Materials, Strategy

OPENERS = {
    "replicas": "hvfreeze.strategies.replicas:open_replicas",
}
"""Strategy -> module:function; the function takes the materials and the configuration. A collective."""


def open_strategy(name: str, materials: Materials, config: Config) -> Strategy:
    """Return the strategy called `name`, one of `OPENERS`, ready for its first epoch.

    Collective: every rank of the materials' world must call this.

    Raises:
        UsageError: the strategy does not fit the model, the world or the settings; on all ranks.
    """
    module, _, function = OPENERS[name].partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), function)(materials, config)
    return strategy
