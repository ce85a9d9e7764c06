"""The probe of a network's features: what it leaves alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hvfreeze.comm.world import SoloWorld
from hvfreeze.freezing.frozen_prefix import hold_in_eval
from hvfreeze.heads.probe import Probe
from hvfreeze.model.blocks import cut_into_blocks


def test_statistics_are_renewed_of_blocks_that_train_and_not_of_frozen_ones() -> None:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Sequential(nn.Flatten(), nn.Linear(48, 2)))
    images = 5 + torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    batch = SimpleNamespace(ids=None, views=None, counted=8)
    feed = SimpleNamespace(images=SimpleNamespace(load=lambda ids, views: images))
    given: Any = SimpleNamespace(learned_from=0, feed=feed, precision="float32", world=SoloWorld())
    given._fitted = lambda count: [batch]
    frozen, trained = (module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    frozen.running_mean.fill_(3.0)
    hold_in_eval(frozen)
    Probe._renew_statistics(given, cut_into_blocks(model))
    assert frozen.running_mean.tolist() == [3.0] * 3 and trained.running_mean.abs().min() > 0
