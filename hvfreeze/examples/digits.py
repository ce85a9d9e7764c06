"""A small data set for the example scripts: scikit-learn's digits, one shard per rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset

from hvfreeze.data.decoding import load_pixels
from hvfreeze.data.sets.opening import open_data
from hvfreeze.data.shards import plan_shards
from hvfreeze.data.views.augment import parse_augment
from hvfreeze.data.views.transform import transform_for


class Digits:
    """Batches of digits for one rank: `for images, labels in digits.epoch(3)`."""

    def __init__(self, rank: int, size: int, *, batch_size: int = 32, samples: int = 512) -> None:
        train = open_data("digits").train
        ids = np.arange(min(samples, len(train)))
        self._plan = plan_shards(train.labels.numpy(), ids, size=size, batch_size=batch_size, seed=0)
        self.rank, self._labels = rank, train.labels
        self._pixels = load_pixels(train, self._plan.shards[rank], budget_bytes=2**30, workers=1)
        self._transform = transform_for(train, augment=parse_augment("none"), data_seed=0, image_size=None)
        self.steps_per_epoch = self._plan.batches_per_epoch

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (B, 3, 32, 32) float images and (B,) labels."""
        for ids in self._plan.epoch_order(epoch, self.rank):
            yield self._transform.clean(self._pixels.fetch(ids)), self._labels[ids]


def digits(samples: int) -> tuple[TensorDataset, TensorDataset]:
    """Return digits to train on, `samples` of them, and a quarter as many to test on: images (3, 32, 32) and labels."""
    table = load_digits()
    images = torch.from_numpy(table.images).float().div(8).sub(1)[:, None].expand(-1, 3, -1, -1)
    images = images.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    labels = torch.from_numpy(table.target).long()
    tested = slice(len(labels) - samples // 4, None)
    return TensorDataset(images[:samples], labels[:samples]), TensorDataset(images[tested], labels[tested])
