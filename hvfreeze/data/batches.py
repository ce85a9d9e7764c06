"""A replica's batches: which samples it meets, in which order and views, and their pixels.

Ranks are known here as `replica` of `replicas`: all ranks that work on one batch together are one replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.config.rules import parse_recipe
from hvfreeze.config.sections import DataConfig
from hvfreeze.data.dealing import Corpus
from hvfreeze.data.decoding import Images, load_pixels
from hvfreeze.data.draws import Ids
from hvfreeze.data.on_disk.broken import all_loaded
from hvfreeze.data.sets.image_set import ImageSet
from hvfreeze.data.shards import ShardPlan, split_validation
from hvfreeze.data.views.augment import MIRRORED, Augment, parse_augment
from hvfreeze.data.views.transform import Statistics, transform_for


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of a forward pass: (B,) ids, views and labels; `counted` of them are real, the rest pads the shape."""

    ids: Ids
    views: Ids
    labels: Tensor
    counted: int


@dataclass(frozen=True)
class TrainFeed:
    """One replica's training batches, a pure function of the epoch."""

    plan: ShardPlan
    replica: int
    labels: Tensor
    images: Images

    def epoch(self, epoch: int) -> list[Batch]:
        """Return the epoch's batches in order, all of the same shape."""
        transform = self.images.transform
        batches = []
        for ids in self.plan.epoch_order(epoch, self.replica):
            views = transform.augment.view_of(ids, epoch=epoch, data_seed=transform.data_seed)
            labels = self.labels[torch.from_numpy(ids)]
            batches.append(Batch(ids=ids, views=views, labels=labels, counted=len(ids)))
        return batches

    def every_view(self) -> list[Batch]:
        """Return batches that count each view of each sample of this replica once, view by view."""
        shard, replicas = self.plan.shards[self.replica], len(self.plan.shards)
        own = shard[self.replica :: replicas] if self.plan.shuffle == "global" else shard
        views = range(max(1, self.images.transform.augment.num_views))
        each = [padded_batches(own, self.labels, self.plan.batch_size, view=view) for view in views]
        return [batch for batches in each for batch in batches]

    def shown(self, augment: Augment, *, without: NDArray[np.bool_] | None = None) -> TrainFeed:
        """Return a feed of the same pixels in other views.

        Args:
            augment: which views.
            without: (samples,) for each sample id whether it is left out; None leaves out nothing.

        Raises:
            UsageError: what is left fills no batch.
        """
        plan = self.plan if without is None else self.plan.without(without)
        transform = replace(self.images.transform, augment=augment)
        return replace(self, plan=plan, images=replace(self.images, transform=transform))

    def held_out(self, fraction: float) -> NDArray[np.bool_]:
        """Return (samples,), for each sample id whether it is among the part of the training samples held out.

        A function of the data seed and of all replicas' samples, so equal on all replicas.
        """
        ids = np.unique(np.concatenate(self.plan.shards))
        _, held = split_validation(self.labels.numpy(), ids, fraction=fraction, seed=self.plan.seed)
        chosen = np.zeros(len(self.labels), dtype=np.bool_)
        chosen[held] = True
        return chosen


def grouped(batches: Sequence[Batch], size: int) -> list[list[Batch]]:
    """Return the batches in order, `size` at a time; what is left at the end is a smaller group."""
    return [list(batches[start : start + size]) for start in range(0, len(batches), size)]


def padded_batches(ids: Ids, labels: Tensor, batch_size: int, *, view: int = 0) -> list[Batch]:
    """Return batches of exactly `batch_size` rows that count each of `ids` once; the last repeats its last sample."""
    batches = []
    for start in range(0, len(ids), batch_size):
        chosen = ids[start : start + batch_size]
        filled = np.pad(chosen, (0, batch_size - len(chosen)), mode="edge")
        views = np.full_like(filled, view)
        batches.append(Batch(ids=filled, views=views, labels=labels[torch.from_numpy(filled)], counted=len(chosen)))
    return batches


def announce(images: Images, batches: Sequence[Batch]) -> None:
    """Tell a streamed source which batches come next, in order."""
    images.pixels.prefetch([batch.ids for batch in batches])


def open_feeds(
    corpus: Corpus,
    data: DataConfig,
    *,
    seed: int,
    replica: int,
    replicas: int,
    budget_bytes: int,
    statistics: Statistics | None = None,
    solved: bool = False,
    mirror: bool = True,
) -> tuple[TrainFeed, Images]:
    """Load the pixels of a replica's training and evaluation samples.

    Args:
        corpus: what `deal` returned.
        data: augmentation and image size.
        seed: the data seed.
        replica: whose samples.
        replicas: how many there are.
        budget_bytes: what each split's pixels may take in memory.
        statistics: what the weights were trained with; --mean and --std come before it, and None is the data set's own.
        solved: see `augment_of`.
        mirror: whether mirror images are wanted where a head is solved.
    """

    def load(image_set: ImageSet, ids: Ids, augment: Augment) -> Images:
        transform = transform_for(
            image_set,
            augment=augment,
            data_seed=seed,
            image_size=data.image_size,
            recipe=parse_recipe(data.recipe),
            statistics=data.statistics() or statistics,
        )
        workers = max(1, torch.get_num_threads())
        return Images(load_pixels(image_set, ids, budget_bytes=budget_bytes, workers=workers), transform)

    augment = augment_of(data, solved=solved, mirrors=mirror and corpus.train.flips)
    train, evaluated = all_loaded(
        partial(load, corpus.train, corpus.plan.shards[replica], augment),
        partial(load, corpus.evaluated, corpus.share(replica=replica, replicas=replicas), parse_augment("none")),
    )
    return TrainFeed(corpus.plan, replica, corpus.train.labels, train), evaluated


def augment_of(data: DataConfig, *, solved: bool, mirrors: bool) -> Augment:
    """Return the views that training samples are shown in.

    Args:
        data: says --augment.
        solved: a head is fitted to them: with anything but `views:K`, which are fixed, a sample is seen as it is and,
            where `mirrors` says so, as its mirror image.
        mirrors: whether a sample's mirror image shows the same, and is wanted.
    """
    augment = parse_augment(data.augment)
    if not solved or augment.kind == "views":
        return augment
    return MIRRORED if mirrors else parse_augment("none")
