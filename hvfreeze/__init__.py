"""Distributed fine-tuning on CPU nodes: ranks vote to freeze front layers, and cache their output.

`auto("photos", weights="DEFAULT")` fine-tunes on a folder of images; `train(Config(...))` runs any configuration. Both
return the run's summary. `load_model` returns a finished run's model.
For a Horovod script: `DistributedOptimizer`, in place of Horovod's, `CachedLoader`, around the script's own loader, and
`fit_head` and `fit_classifier`, which fit the last layer, or a head on the features of all blocks, in closed form.
`HvfreezeError` is the base class of all errors. Everything else can be imported from its module, and may move.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__version__ = "0.2.0"

# Loaded on first use: `hvfreeze --help` should not wait for torch.
_PUBLIC = {
    "auto": "training.run",
    "CachedLoader": "integration.cached_loader",
    "Config": "config.tree",
    "DistributedOptimizer": "integration.optimizer",
    "FreezeConfig": "freezing.settings",
    "HvfreezeError": "errors",
    "fit_classifier": "integration.fit_classifier",
    "fit_head": "integration.fit_head",
    "load_model": "inference.model",
    "train": "training.run",
}
_EARLIER = {
    "BatchActivations": "integration.batch_activations.BatchActivations",
    "Cadence": "freezing.cadence.Cadence",
    "Chain": "model.blocks.Chain",
    "Freezer": "freezing.freezer.Freezer",
    "PrefixActivations": "cache.activations.PrefixActivations",
    "Reducer": "comm.reducer.Reducer",
    "SoloWorld": "comm.world.SoloWorld",
    "UsageError": "errors.UsageError",
    "Voter": "freezing.vote.Voter",
    "World": "comm.world.World",
    "broadcast_model": "comm.replica_sync.broadcast_model",
    "cut_into_blocks": "model.blocks.cut_into_blocks",
    "freeze_by_vote": "freezing.freezer.freeze_by_vote",
    "load": "inference.model.load_model",
    "open_world": "integration.script_world.script_world",
}
"""Deprecated names of this module, with their new places."""

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"hvfreeze.{_PUBLIC[name]}"), name)
    if name not in _EARLIER:
        raise AttributeError(f"module 'hvfreeze' has no attribute '{name}'")
    home, _, now = f"hvfreeze.{_EARLIER[name]}".rpartition(".")
    better = f"hvfreeze.{now}" if now in _PUBLIC else f"from {home} import {now}"
    warnings.warn(
        f"hvfreeze.{name} will be removed in the next version; use {better}", DeprecationWarning, stacklevel=2
    )
    return getattr(importlib.import_module(home), now)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
