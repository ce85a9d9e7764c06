"""The samples of a run: which are trained on, which are evaluated, who gets which, and their pixels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hvfreeze.config.tree import Config
from hvfreeze.data.datasets import DataSplits, ImageSet, open_data, prepare_data
from hvfreeze.data.decoding import load_pixels
from hvfreeze.data.feed import Ids, Images, TrainFeed, evaluation_ids
from hvfreeze.data.shards import ShardPlan, plan_shards, split_validation, stratified_subset
from hvfreeze.data.views import Augment, Transform, parse_augment, transform_for
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.machine.share import memory_budget
from hvfreeze.ranks.world import World

# What torchvision's own weights were trained with, mean and standard deviation.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Corpus:
    """The samples of a run: what is trained on, what is evaluated on, and who gets which."""

    train: ImageSet
    evaluated: ImageSet
    evaluated_ids: Ids
    plan: ShardPlan
    notes: list[str]

    def identities(self) -> dict[str, str]:
        """Return digests of the samples, equal for equal data on other machines."""
        return {"train": self.train.identity(local=False), "test": self.evaluated.identity(local=False)}

    def share(self, world: World) -> Ids:
        """Return the samples that this rank evaluates."""
        return self.evaluated_ids[evaluation_ids(len(self.evaluated_ids), rank=world.rank, size=world.size)]


def open_corpus(config: Config, world: World) -> Corpus:
    """Find the data and deal it out; nothing is decoded yet.

    Collective: every rank of `world` must call this.
    """
    data = config.data
    together(world, lambda: prepare_data(data.data, data.data_dir) if world.local_rank == 0 else None, name="download")
    splits = together(world, lambda: open_data(data.data, data.data_dir, image_size=data.image_size), name="data")
    return together(world, lambda: deal(config, splits, size=world.size), name="shards")


def deal(config: Config, splits: DataSplits, *, size: int) -> Corpus:
    """Choose training and evaluation samples and plan the shards."""
    train, data, seed = splits.train, config.data, config.data_seed
    labels = train.labels.numpy()
    ids = np.arange(len(train), dtype=np.int64)
    if data.train_samples is not None:
        ids = stratified_subset(labels, data.train_samples, seed=seed)
    evaluated, evaluated_ids = splits.test, np.arange(len(splits.test), dtype=np.int64)
    if data.validation_fraction > 0:
        ids, held_out = split_validation(labels, ids, fraction=data.validation_fraction, seed=seed)
        evaluated, evaluated_ids = train, held_out
    plan = plan_shards(
        labels,
        ids,
        size=size,
        batch_size=config.optimizer.batch_size,
        seed=seed,
        shuffle=data.shuffle,
        partition=data.partition,
        shard_sizes=data.shard_sizes,
    )
    notes = list(splits.notes)
    if data.validation_fraction > 0:
        notes.append(f"{len(evaluated_ids)} training samples are held out; accuracy is on them, not on the test set")
    return Corpus(train, evaluated, evaluated_ids, plan, notes)


def open_feeds(config: Config, world: World, corpus: Corpus) -> tuple[TrainFeed, Images]:
    """Load the pixels of this rank's training and evaluation samples."""
    augment = parse_augment(config.data.augment)
    shard = corpus.plan.shards[world.rank]
    share = corpus.share(world)
    train = open_images(config, corpus.train, shard, augment, local_size=world.local_size)
    evaluated = open_images(config, corpus.evaluated, share, parse_augment("none"), local_size=world.local_size)
    return TrainFeed(corpus.plan, world.rank, corpus.train.labels, train), evaluated


def open_images(config: Config, image_set: ImageSet, ids: Ids, augment: Augment, *, local_size: int) -> Images:
    """Return the images of `ids`, in memory where they fit and streamed where not."""
    transform: Transform = transform_for(
        image_set, augment=augment, data_seed=config.data_seed, image_size=config.data.image_size
    )
    if config.model.weights == "DEFAULT":
        transform = replace(transform, mean=IMAGENET[0], std=IMAGENET[1])
    workers = max(1, torch.get_num_threads())
    pixels = load_pixels(image_set, ids, budget_bytes=memory_budget(local_size), workers=workers)
    return Images(pixels, transform)
