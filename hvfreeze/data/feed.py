"""From sample ids to batches: which samples a rank trains on, in which order, and what their pixels look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.data.decoding import MemoryPixels, StreamedPixels
from hvfreeze.data.shards import ShardPlan
from hvfreeze.data.views import Transform

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples of one step: (B,) ids, views and labels; `counted` of them are real, the rest pads the shape."""

    ids: Ids
    views: Ids
    labels: Tensor
    counted: int


@dataclass(frozen=True)
class Images:
    """Float images of any view of the samples that this rank holds."""

    pixels: MemoryPixels | StreamedPixels
    transform: Transform

    def load(self, ids: Ids, views: Ids) -> Tensor:
        """Return (B, C, S, S) float32, channels last, augmented and normalised; row i shows view views[i] of ids[i]."""
        images = self.transform(self.pixels.fetch(ids), ids=ids, views=views)
        return images.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class TrainFeed:
    """This rank's training batches, a pure function of the epoch."""

    plan: ShardPlan
    rank: int
    labels: Tensor
    images: Images

    def epoch(self, epoch: int) -> list[Batch]:
        """Return the epoch's batches in order, all of the same shape."""
        transform = self.images.transform
        batches = []
        for ids in self.plan.epoch_order(epoch, self.rank):
            views = transform.augment.view_of(ids, epoch=epoch, data_seed=transform.data_seed)
            labels = self.labels[torch.from_numpy(ids)]
            batches.append(Batch(ids=ids, views=views, labels=labels, counted=len(ids)))
        return batches


def evaluation_ids(total: int, *, rank: int, size: int) -> Ids:
    """Return the samples that `rank` evaluates: every sample on exactly one rank."""
    return np.arange(rank, total, size, dtype=np.int64)


def padded_batches(ids: Ids, labels: Tensor, batch_size: int) -> list[Batch]:
    """Return batches of exactly `batch_size` rows that count each of `ids` once; the last repeats its last sample."""
    batches = []
    for start in range(0, len(ids), batch_size):
        chosen = ids[start : start + batch_size]
        filled = np.pad(chosen, (0, batch_size - len(chosen)), mode="edge")
        views = np.zeros_like(filled)
        batches.append(Batch(ids=filled, views=views, labels=labels[torch.from_numpy(filled)], counted=len(chosen)))
    return batches


def announce(images: Images, batches: Sequence[Batch]) -> None:
    """Tell a streamed source which batches come next, in order."""
    images.pixels.prefetch([batch.ids for batch in batches])
