"""Distributed fine-tuning on CPU nodes in which ranks vote front layers frozen and cache their output.

For a Horovod script: `DistributedOptimizer`, in place of Horovod's, and `CachedLoader`, around the script's own loader.

The parts of a training loop, one by one: `cut_into_blocks` and `Chain`, `open_world` and `broadcast_model`, `Reducer`,
`Freezer` (or `freeze_by_vote`, which builds it with the usual settings), `PrefixActivations`. `load` returns a finished
run's model.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Loaded on first use: `hvfreeze --help` should not wait for torch.
_HOMES = {
    "BatchActivations": "own_loop.cached.passes",
    "CachedLoader": "own_loop.cached.loader",
    "Cadence": "freezing.cadence",
    "Chain": "chain.blocks",
    "DistributedOptimizer": "own_loop.optimizer",
    "FreezeConfig": "config.sections",
    "Freezer": "freezing.freezer",
    "PrefixActivations": "cache.activations",
    "Reducer": "ranks.reducer",
    "SoloWorld": "ranks.world",
    "UsageError": "errors",
    "Voter": "freezing.voting.weights",
    "World": "ranks.world",
    "broadcast_model": "ranks.equal_models",
    "cut_into_blocks": "chain.blocks",
    "freeze_by_vote": "freezing.freeze_by_vote",
    "load": "applying.model",
    "open_world": "ranks.horovod_world",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hvfreeze' has no attribute '{name}'")
    return getattr(importlib.import_module(f"hvfreeze.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
