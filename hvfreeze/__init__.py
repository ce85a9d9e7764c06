"""Distributed fine-tuning on CPU nodes: ranks vote to freeze front layers, and cache their output.

`auto("photos", weights="DEFAULT")` fine-tunes on a folder of images; `train(Config(...))` runs any configuration. Both
return the run's summary. `load_model` returns a finished run's model.
For a Horovod script: `DistributedOptimizer`, in place of Horovod's, `CachedLoader`, around the script's own loader, and
`fit_head` and `fit_classifier`, which fit the last layer, or a head on the features of all blocks, in one pass over the
data.
`HvfreezeError` is the base class of all errors. Everything else can be imported from its module, and may move.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

# Loaded on first use: `hvfreeze --help` should not wait for torch.
_PUBLIC = {
    "auto": "training.run",
    "CachedLoader": "integration.cached_loader",
    "Config": "config.tree",
    "DistributedOptimizer": "integration.optimizer",
    "FreezeConfig": "config.freeze",
    "HvfreezeError": "errors",
    "fit_classifier": "integration.fit_classifier",
    "fit_head": "integration.fit_head",
    "load_model": "inference.model",
    "train": "training.run",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hvfreeze' has no attribute '{name}'")
    return getattr(importlib.import_module(f"hvfreeze.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
