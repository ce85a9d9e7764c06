"""A small image model, and a data set that counts what is read of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

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


class Counting(Dataset[Any]):
    def __init__(self, inner: TensorDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        LOADED.append(index)
        return self.inner[index]


LOADED: list[int] = []
