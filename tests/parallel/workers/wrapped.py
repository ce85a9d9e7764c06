"""An optimizer wrapped as in a script of one's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hvfreeze.config.sections import FreezeConfig
from hvfreeze.own_loop.optimizer import DistributedOptimizer
from hvfreeze.ranks.world import World

STEPS = 4


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, world: World, **options: Any) -> DistributedOptimizer:
    given: dict[str, Any] = {"settings": FreezeConfig(), "steps_per_epoch": STEPS, "num_epochs": 3, **options}
    return DistributedOptimizer(optimizer, model.named_parameters(), model=model, world=world, **given)
