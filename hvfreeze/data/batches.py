"""The batches of a replica: samples, order, augmented views and pixels.

Ranks appear as `replica` of `replicas`: all ranks that work on one batch together are one replica.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.config.data import DataConfig, parse_recipe
from hvfreeze.data.data_sets import DataSplits, ImageSet
from hvfreeze.data.decoding import Images, Inputs, Pool, load_pixels
from hvfreeze.data.images import listed, load_all
from hvfreeze.data.shards import Ids, ShardPlan, evenly, plan_shards, split_held_out, stratified_subset
from hvfreeze.data.text import TextSource
from hvfreeze.data.views import MIRRORED, Augment, Statistics, parse_augment, transform_for
from hvfreeze.data.windows import Shift, Windows
from hvfreeze.errors import RefusedError
from hvfreeze.rules import rule
from hvfreeze.tasks import Task
from hvfreeze.wording import plural


@dataclass(frozen=True)
class Corpus:
    """The training and evaluation samples of a run, and the shard of each replica."""

    train: ImageSet
    evaluated: ImageSet
    evaluated_ids: Ids
    plan: ShardPlan
    notes: list[str]
    task: Task
    """The kind of output that the run's models predict."""

    def identities(self) -> dict[str, str]:
        """Return digests of the datasets; equal data give equal digests on every machine."""
        train, weights = self.train.identity(local=False), self.train.weights
        if weights is not None:
            # Not part of the data set's own identity: cached rows do not depend on weights.
            train = hashlib.sha256(train.encode() + weights.numpy().tobytes()).hexdigest()
        return {"train": train, "test": self.evaluated.identity(local=False)}

    def sampled_pixels(self) -> dict[str, str]:
        """Return digests of a few decoded images, which reveal changed files with unchanged names and sizes."""
        return {"train": self.train.sample_digest(), "test": self.evaluated.sample_digest()}

    def share(self, replica: int) -> Ids:
        """Return the samples that `replica` evaluates. Each sample belongs to exactly one replica."""
        return self.evaluated_ids[replica :: self.plan.replicas]


def choose(splits: DataSplits, data: DataConfig, *, seed: int) -> tuple[Ids, ImageSet, Ids]:
    """Return the ids of the training samples, the split to evaluate, and the ids of its samples.

    Raises:
        UsageError: the settings ask for more samples than there are.
        RefusedError: no sample can be decoded.
    """
    train, labels = splits.train, splits.train.strata
    ids = train.ids
    for name, part in (("training", train), *([] if data.validation_fraction > 0 else [("test", splits.test)])):
        if not len(part.ids):
            raise RefusedError(
                f"--data ({data.data}): none of the {plural(len(part.labels), f'{name} sample')} can be "
                f"decoded: {listed(list(part.broken.values()))}; repair the files or name other data"
            )
    if data.train_samples is not None:
        ids = ids[stratified_subset(labels[ids], data.train_samples, seed=seed)]
    if data.validation_fraction > 0:
        kept, held_out = split_held_out(labels, ids, fraction=data.validation_fraction, seed=seed)
        wanted = f"0, or large enough to hold out some of {plural(len(ids), 'sample')}"
        rule(len(held_out) > 0, "validation-fraction", data.validation_fraction, wanted)
        return kept, train, held_out
    return ids, splits.test, splits.test.ids


def notes_on_weights(train: ImageSet) -> list[str]:
    """Return log lines on training samples of weight 0, and on classes and labels that lose all of theirs."""
    left = 0 if train.weights is None else int((train.weights == 0).sum())
    if not left:
        return []
    lost = train.task.present(train.labels) & ~train.task.present(train.labels[torch.from_numpy(train.ids)])
    return [
        f"{plural(left, 'training image has', 'training images have')} weight 0: left out",
        *(
            f"{train.task.nouns[0]} {train.classes[place]} has no training image with a weight above 0"
            for place in lost.nonzero().flatten()
        ),
    ]


def notes_on_broken(splits: DataSplits) -> list[str]:
    """Return a log line on the images that are left out; an empty list if there are none."""
    reasons = [reason for part in (splits.train, splits.test) for reason in part.broken.values()]
    are = "is" if len(reasons) == 1 else "are"
    told = f"{plural(len(reasons), 'image')} cannot be decoded and {are} left out: {listed(reasons)}"
    return [told] if reasons else []


def deal(
    splits: DataSplits,
    data: DataConfig,
    *,
    seed: int,
    batch_size: int,
    replicas: int,
    whole_batches: bool = True,
    holds_out: bool = False,
) -> Corpus:
    """Choose training and evaluation samples and plan the shards, without decoding images.

    With `whole_batches`, a note counts the samples that fill no batch; without it, the run also uses partial batches.
    If the smallest shard fills no batch, the batch size is lowered to that shard's size, and a note says so; with
    `holds_out` to half of it, so that a batch remains after samples are held out.

    Raises:
        UsageError: there are too few samples for the settings.
    """
    ids, evaluated, evaluated_ids = choose(splits, data, seed=seed)
    plan = plan_shards(
        splits.train.strata,
        ids,
        size=replicas,
        batch_size=1,
        seed=seed,
        shuffle=data.shuffle,
        partition=data.partition,
        shard_sizes=data.shard_sizes,
    )
    notes = [*splits.notes, *notes_on_broken(splits), *notes_on_weights(splits.train)]
    smallest = plan.batches_per_epoch
    if batch_size > smallest:
        lower = max(1, smallest // 2) if holds_out else smallest
        which = f"{'half of ' if holds_out else ''}the {plural(smallest, 'sample')} of the rank with the fewest"
        notes.append(f"batch size {lower} instead of {batch_size}: {which}")
        batch_size = lower
    plan = plan.in_batches(batch_size)
    if data.validation_fraction > 0:
        held = plural(len(evaluated_ids), "training sample is", "training samples are")
        notes.append(f"{held} held out; accuracy is measured on the held-out samples, not on the test set")
    dropped = len(ids) - plan.batches_per_epoch * batch_size * replicas
    if dropped > 0 and whole_batches:
        notes.append(
            f"each epoch skips {dropped} of {len(ids)} training samples, different ones each time: "
            f"every shard makes {plural(plan.batches_per_epoch, 'whole batch', 'whole batches')} of {batch_size}"
        )
    return Corpus(splits.train, evaluated, evaluated_ids, plan, notes, splits.train.task)


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples of one forward pass: (B,) ids, views and labels. The first `counted` are real, the rest is padding.

    Labels have the task's form; for windows of text they are the (B, T) next characters.
    """

    ids: Ids
    views: Ids
    labels: Tensor
    counted: int


FEW_VIEWS = 16_384
"""Least size of a random subset of views. A set of more than twice as many is represented by a subset."""


PIXELS_AT_ONCE, MOST_AT_ONCE = 128 * 32 * 32, 128
"""Pixels and samples in a batch without training. Deep layers see few pixels of a small image: a ResNet-18 takes 1.4x
longer per 32-pixel image with batches of 32 than with batches of 128."""


def rows_at_once(batch_size: int, shape: Sequence[int]) -> int:
    """Return the batch size of forward passes without training, for samples of `shape`.

    It is larger than `batch_size` for small images, (C, H, W), and equal to it for windows of text, (T,).
    """
    if len(shape) < 2:
        return batch_size
    return max(batch_size, min(MOST_AT_ONCE, PIXELS_AT_ONCE // math.prod(shape[1:])))


@dataclass(frozen=True)
class TrainFeed:
    """The training batches of one replica, a pure function of the epoch."""

    plan: ShardPlan
    replica: int
    strata: NDArray[np.int64]
    """Class of each sample for stratified sharding, (samples,) int64. The labels of a batch come from `images`."""
    images: Inputs
    rows: int
    """Batch size of forward passes without training."""

    def epoch(self, epoch: int) -> list[Batch]:
        """Return the epoch's batches in order, all of the same shape."""
        transform = self.images.transform
        batches = []
        for ids in self.plan.epoch_order(epoch, self.replica):
            views = transform.augment.view_of(ids, epoch=epoch, data_seed=transform.data_seed)
            labels = self.images.labels_of(ids, views)
            batches.append(Batch(ids=ids, views=views, labels=labels, counted=len(ids)))
        return batches

    def every_view(self, *, of: NDArray[np.bool_] | None = None) -> list[Batch]:
        """Return batches that contain each view of each sample of this replica once, view by view.

        `of` is a mask of sample ids, (samples,); None selects all samples.
        """
        own = self.plan.owned(self.replica)
        own = own if of is None else own[of[own]]
        views = range(max(1, self.images.transform.augment.num_views))
        each = [padded_batches(own, self.images.labels_of, self.rows, view=view) for view in views]
        return [batch for batches in each for batch in batches]

    def sampled_views(self) -> tuple[list[Batch] | None, list[Batch]]:
        """Return the batches of `every_view` in two lists: a random subset of samples, and all others.

        The subset does not depend on the sharding. With few samples the first list is None.
        """
        step = self.plan.samples * max(1, self.images.transform.augment.num_views) // FEW_VIEWS
        if step < 2:
            return None, self.every_view()
        few = np.zeros(len(self.strata), dtype=np.bool_)
        few[np.unique(np.concatenate(self.plan.shards))[::step]] = True
        return self.every_view(of=few), self.every_view(of=~few)

    def some_of(self, chosen: NDArray[np.bool_], most: int) -> NDArray[np.bool_]:
        """Return a mask of at most `most` of this replica's `chosen` samples, evenly spaced, (samples,).

        Even spacing covers all classes: samples are often sorted by class. `chosen` is a mask, (samples,).
        """
        own = self.plan.owned(self.replica)
        some = np.zeros_like(chosen)
        some[evenly(own[chosen[own]], most)] = True
        return some

    def shown(self, augment: Augment, *, mirrors: bool, without: NDArray[np.bool_] | None = None) -> TrainFeed:
        """Return a feed of the same pixels with another augmentation.

        Args:
            augment: the views to show.
            mirrors: whether views include horizontal flips.
            without: mask of the sample ids to leave out, (samples,); None keeps all.

        Raises:
            UsageError: the remaining samples fill no batch.
        """
        plan = self.plan if without is None else self.plan.without(without)
        return replace(self, plan=plan, images=self.images.shown(augment, mirrors=mirrors))

    def held_out(self, fraction: float) -> NDArray[np.bool_]:
        """Return a mask of the held-out training samples, (samples,).

        It depends on the data seed and on the samples of all replicas, so it is equal on all replicas.
        """
        ids = np.unique(np.concatenate(self.plan.shards))
        _, held = split_held_out(self.strata, ids, fraction=fraction, seed=self.plan.seed)
        chosen = np.zeros(len(self.strata), dtype=np.bool_)
        chosen[held] = True
        return chosen


def group_batches(batches: Sequence[Batch], size: int) -> list[list[Batch]]:
    """Return the batches in groups of `size`, in order; the last group may be smaller."""
    return [list(batches[start : start + size]) for start in range(0, len(batches), size)]


def first_of(batches: Sequence[Batch], count: int, *, rows: int) -> list[Batch]:
    """Return the first `count` samples of the batches, in batches of `rows` without padding."""
    if not batches:
        return []
    ids, views, labels = (
        torch.cat([torch.as_tensor(part)[: batch.counted] for part, batch in zip(parts, batches)])[:count].split(rows)
        for parts in zip(*((batch.ids, batch.views, batch.labels) for batch in batches))
    )
    found = zip(ids, views, labels, strict=True)
    return [Batch(own.numpy(), seen.numpy(), each, counted=len(own)) for own, seen, each in found]


LabelsOf = Callable[[Ids, Ids], Tensor]
"""Ids and views -> labels; see `Batch`."""


def padded_batches(ids: Ids, labels_of: LabelsOf, batch_size: int, *, view: int = 0) -> list[Batch]:
    """Return batches of exactly `batch_size` rows that contain each of `ids` once; the last repeats its last sample."""
    batches = []
    for start in range(0, len(ids), batch_size):
        chosen = ids[start : start + batch_size]
        filled = np.pad(chosen, (0, batch_size - len(chosen)), mode="edge")
        views = np.full_like(filled, view)
        batches.append(Batch(ids=filled, views=views, labels=labels_of(filled, views), counted=len(chosen)))
    return batches


def announce(images: Inputs, batches: Sequence[Batch]) -> None:
    """Announce the next batches to the decoding threads, in order."""
    images.prefetch([batch.ids for batch in batches])


def open_feeds(
    corpus: Corpus,
    data: DataConfig,
    *,
    seed: int,
    replica: int,
    budget_bytes: int,
    statistics: Statistics | None = None,
    fits_head: bool = False,
    pools: tuple[Pool | None, Pool | None] = (None, None),
    rows: int | None = None,
) -> tuple[TrainFeed, Inputs]:
    """Load the pixels, or windows of text, of a replica's training and evaluation samples.

    Args:
        corpus: the result of `deal`.
        data: augmentation, horizontal flips and image size.
        seed: the data seed.
        replica: the replica's index.
        budget_bytes: memory for the pixels of each split.
        statistics: mean and standard deviation that the weights were trained with; --mean and --std override them,
            and None takes the dataset's.
        fits_head: see `augment_of`.
        pools: shared memory for the training and the evaluation samples, if any.
        rows: batch size of forward passes without training; None is the training batch size.
    """
    mirrors = data.mirrors(corpus.train.flips)

    def load(image_set: ImageSet, ids: Ids, augment: Augment, pool: Pool | None) -> Inputs:
        if isinstance(image_set.source, TextSource):
            return Windows(image_set.source, Shift(data_seed=seed, augment=augment))
        transform = transform_for(
            image_set,
            augment=augment,
            data_seed=seed,
            image_size=data.image_size,
            recipe=parse_recipe(data.recipe),
            statistics=data.statistics() or statistics,
            mirrors=mirrors,
        )
        workers = max(1, torch.get_num_threads())
        pixels = load_pixels(image_set, ids, budget_bytes=budget_bytes, workers=workers, pool=pool)
        return Images(pixels, transform, image_set.labels)

    augment = augment_of(data, fits_head=fits_head, mirrors=mirrors)
    train, evaluated = load_all(
        partial(load, corpus.train, corpus.plan.shards[replica], augment, pools[0]),
        partial(load, corpus.evaluated, corpus.share(replica), parse_augment("none"), pools[1]),
    )
    rows = corpus.plan.batch_size if rows is None else rows
    return TrainFeed(corpus.plan, replica, corpus.train.strata, train, rows), evaluated


def augment_of(data: DataConfig, *, fits_head: bool, mirrors: bool) -> Augment:
    """Return the augmentation of training samples.

    Args:
        data: the data settings, with --augment.
        fits_head: whether a head is fitted to the samples. The fit then sees samples unaugmented and, with `mirrors`,
            flipped, unless --augment is `views:K` or the head itself averages over flips.
        mirrors: whether views include horizontal flips.
    """
    augment = parse_augment(data.augment)
    if not fits_head or augment.kind == "views":
        return augment
    return MIRRORED if mirrors and data.flips != "mean" else parse_augment("none")
