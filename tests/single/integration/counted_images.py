"""A small image model, and a data set that counts its reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.integration.optimizer import DistributedOptimizer

EPOCHS, ROWS, SAMPLES = 5, 4, 16


def image_model() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    rest = [nn.Conv2d(6, 6, 3), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 3)]
    return nn.Sequential(first, *rest)


def images() -> Counting:
    generator = torch.Generator().manual_seed(1)
    pixels, labels = torch.randn(SAMPLES, 3, 8, 8, generator=generator), torch.arange(SAMPLES) % 3
    return Counting(TensorDataset(pixels, labels))


def still(model: nn.Module, cut: int = 1, **options: Any) -> DistributedOptimizer:
    """An optimizer that changes nothing, with the first blocks frozen."""
    settings = FreezeConfig(freeze="static", cut=cut)
    length: dict[str, Any] = {"steps_per_epoch": 4, "num_epochs": 6}
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    return DistributedOptimizer(inner, model=model, settings=settings, world=SoloWorld(), **length, **options)


class Counting(Dataset[Any]):
    def __init__(self, inner: TensorDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        LOADED.append(index)
        return self.inner[index]


LOADED: list[int] = []
