"""A replica's batches: which samples it meets, in which order and views, and their pixels.

Ranks are known here as `replica` of `replicas`: all ranks that work on one batch together are one replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.data.data_sets import DataSplits, ImageSet
from hvfreeze.data.decoding import Images, Inputs, Pool, load_pixels
from hvfreeze.data.images import all_loaded, listed
from hvfreeze.data.settings import DataConfig, parse_recipe
from hvfreeze.data.shards import Ids, ShardPlan, evenly, plan_shards, split_validation, stratified_subset
from hvfreeze.data.text import TextSource
from hvfreeze.data.views import MIRRORED, Augment, Statistics, parse_augment, transform_for
from hvfreeze.data.windows import Shift, Windows
from hvfreeze.errors import RefusedError
from hvfreeze.tasks import Task
from hvfreeze.wording import plural


@dataclass(frozen=True)
class Corpus:
    """The samples of a run: what is trained on, what is evaluated on, and who gets which."""

    train: ImageSet
    evaluated: ImageSet
    evaluated_ids: Ids
    plan: ShardPlan
    notes: list[str]
    task: Task
    """What the run's models answer."""

    def identities(self) -> dict[str, str]:
        """Return digests of the samples, equal for equal data on other machines."""
        return {"train": self.train.identity(local=False), "test": self.evaluated.identity(local=False)}

    def sampled_pixels(self) -> dict[str, str]:
        """Return digests of a few decoded images: other files of the same names and sizes give others."""
        return {"train": self.train.sample_digest(), "test": self.evaluated.sample_digest()}

    def share(self, replica: int) -> Ids:
        """Return the samples that `replica` evaluates: every sample in exactly one replica."""
        return self.evaluated_ids[replica :: self.plan.replicas]


def choose(splits: DataSplits, data: DataConfig, *, seed: int) -> tuple[Ids, ImageSet, Ids]:
    """Return the training samples' ids, the split that is evaluated, and which of its samples are.

    Raises UsageError where there are fewer samples than the settings ask for, RefusedError where none can be used.
    """
    train, labels = splits.train, splits.train.strata
    ids = train.ids
    for name, part in (("training", train), *([] if data.validation_fraction > 0 else [("test", splits.test)])):
        if not len(part.ids):
            raise RefusedError(
                f"--data ({data.data}): no {name} sample is left of {len(part.labels)}, the others cannot be used: "
                f"{listed(list(part.broken.values()))}; mend them, or name other data"
            )
    if data.train_samples is not None:
        ids = ids[stratified_subset(labels[ids], data.train_samples, seed=seed)]
    if data.validation_fraction > 0:
        ids, held_out = split_validation(labels, ids, fraction=data.validation_fraction, seed=seed)
        return ids, train, held_out
    return ids, splits.test, splits.test.ids


def notes_on_broken(splits: DataSplits) -> list[str]:
    """Return a line about the images that are left out, where there are some."""
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
    """Choose training and evaluation samples and plan the shards; nothing is decoded.

    With `whole_batches` the notes tell which samples fill no batch; without, the run uses batches that are not full.
    Where the smallest shard would fill no batch, batches are as large as that shard, and a note says so; half as large
    with `holds_out`, so that one is left when samples of the shard are held out. Raises UsageError where the samples do
    not suffice for what the settings ask.
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
    notes = [*splits.notes, *notes_on_broken(splits)]
    smallest = plan.batches_per_epoch
    if batch_size > smallest:
        lower = max(1, smallest // 2) if holds_out else smallest
        which = f"{'half of ' if holds_out else ''}the smallest shard, which has {plural(smallest, 'sample')}"
        notes.append(f"--batch-size ({batch_size}) is lowered to {lower}: {which}")
        batch_size = lower
    plan = plan.in_batches(batch_size)
    if data.validation_fraction > 0:
        held = plural(len(evaluated_ids), "training sample is", "training samples are")
        notes.append(f"{held} held out; accuracy is on what is held out, not on the test set")
    dropped = len(ids) - plan.batches_per_epoch * batch_size * replicas
    if dropped > 0 and whole_batches:
        notes.append(
            f"each epoch leaves out {dropped} of {len(ids)} training samples, others each time: "
            f"every shard makes {plural(plan.batches_per_epoch, 'whole batch', 'whole batches')} of {batch_size}"
        )
    return Corpus(splits.train, evaluated, evaluated_ids, plan, notes, splits.train.task)


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of a forward pass: (B,) ids and views, and labels; `counted` of them are real, the rest pads the shape.

    Labels are as the task has them, or the (B, T) characters that follow those of windows.
    """

    ids: Ids
    views: Ids
    labels: Tensor
    counted: int


FEW_VIEWS = 16_384
"""That stand for all, at least, where there are more than twice as many."""


PIXELS_AT_ONCE, MOST_AT_ONCE = 128 * 32 * 32, 128
"""In a batch that trains nothing. Deep layers see few pixels of a small image: a ResNet-18 takes 1.4 times as long for
an image of 32 pixels when there are 32 as when there are 128."""


def rows_at_once(batch_size: int, shape: Sequence[int]) -> int:
    """Return how many samples of `shape` go through a network at once where nothing is trained.

    At least a training batch; more small images, (C, H, W), but no more windows, (T,).
    """
    if len(shape) < 2:
        return batch_size
    return max(batch_size, min(MOST_AT_ONCE, PIXELS_AT_ONCE // math.prod(shape[1:])))


@dataclass(frozen=True)
class TrainFeed:
    """One replica's training batches, a pure function of the epoch."""

    plan: ShardPlan
    replica: int
    strata: NDArray[np.int64]
    """(samples,) int64 by which samples are shared out; the labels of a batch come from `images`."""
    images: Inputs
    rows: int
    """Of a batch that trains nothing."""

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
        """Return batches that count each view of each sample of this replica once, view by view.

        `of` is (samples,), for each sample id whether it is meant; None means all.
        """
        own = self.plan.owned(self.replica)
        own = own if of is None else own[of[own]]
        views = range(max(1, self.images.transform.augment.num_views))
        each = [padded_batches(own, self.images.labels_of, self.rows, view=view) for view in views]
        return [batch for batches in each for batch in batches]

    def sampled_views(self) -> tuple[list[Batch] | None, list[Batch]]:
        """Return the batches of `every_view`, of many samples first those of a few and then those of all others.

        The few are the same ones whoever has them. Of fewer samples the first list is None.
        """
        step = self.plan.samples * max(1, self.images.transform.augment.num_views) // FEW_VIEWS
        if step < 2:
            return None, self.every_view()
        few = np.zeros(len(self.strata), dtype=np.bool_)
        few[np.unique(np.concatenate(self.plan.shards))[::step]] = True
        return self.every_view(of=few), self.every_view(of=~few)

    def some_of(self, chosen: NDArray[np.bool_], most: int) -> NDArray[np.bool_]:
        """Return which samples are among at most `most` of this replica's of those `chosen`, which lie evenly.

        Both are (samples,). Samples often lie in order of their classes.
        """
        own = self.plan.owned(self.replica)
        some = np.zeros_like(chosen)
        some[evenly(own[chosen[own]], most)] = True
        return some

    def shown(self, augment: Augment, *, mirrors: bool, without: NDArray[np.bool_] | None = None) -> TrainFeed:
        """Return a feed of the same pixels in other views.

        Args:
            augment: which views.
            mirrors: whether mirror images are among them.
            without: (samples,) for each sample id whether it is left out; None leaves out nothing.

        Raises:
            UsageError: what is left fills no batch.
        """
        plan = self.plan if without is None else self.plan.without(without)
        return replace(self, plan=plan, images=self.images.shown(augment, mirrors=mirrors))

    def held_out(self, fraction: float) -> NDArray[np.bool_]:
        """Return (samples,), for each sample id whether it is among the part of the training samples held out.

        A function of the data seed and of all replicas' samples, so equal on all replicas.
        """
        ids = np.unique(np.concatenate(self.plan.shards))
        _, held = split_validation(self.strata, ids, fraction=fraction, seed=self.plan.seed)
        chosen = np.zeros(len(self.strata), dtype=np.bool_)
        chosen[held] = True
        return chosen


def grouped(batches: Sequence[Batch], size: int) -> list[list[Batch]]:
    """Return the batches in order, `size` at a time; what is left at the end is a smaller group."""
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
    """Return batches of exactly `batch_size` rows that count each of `ids` once; the last repeats its last sample."""
    batches = []
    for start in range(0, len(ids), batch_size):
        chosen = ids[start : start + batch_size]
        filled = np.pad(chosen, (0, batch_size - len(chosen)), mode="edge")
        views = np.full_like(filled, view)
        batches.append(Batch(ids=filled, views=views, labels=labels_of(filled, views), counted=len(chosen)))
    return batches


def announce(images: Inputs, batches: Sequence[Batch]) -> None:
    """Tell a streamed source which batches come next, in order."""
    images.prefetch([batch.ids for batch in batches])


def open_feeds(
    corpus: Corpus,
    data: DataConfig,
    *,
    seed: int,
    replica: int,
    budget_bytes: int,
    statistics: Statistics | None = None,
    solved: bool = False,
    pools: tuple[Pool | None, Pool | None] = (None, None),
    rows: int | None = None,
) -> tuple[TrainFeed, Inputs]:
    """Load the pixels, or windows, of a replica's training and evaluation samples.

    Args:
        corpus: what `deal` returned.
        data: augmentation, mirror images and image size.
        seed: the data seed.
        replica: whose samples.
        budget_bytes: what each split's pixels may take in memory.
        statistics: what the weights were trained with; --mean and --std come before it, and None is the data set's own.
        solved: see `augment_of`.
        pools: memory for the training and the evaluation samples, where that is taken already.
        rows: of a batch that trains nothing; None is as many as of one that trains.
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

    augment = augment_of(data, solved=solved, mirrors=mirrors)
    train, evaluated = all_loaded(
        partial(load, corpus.train, corpus.plan.shards[replica], augment, pools[0]),
        partial(load, corpus.evaluated, corpus.share(replica), parse_augment("none"), pools[1]),
    )
    rows = corpus.plan.batch_size if rows is None else rows
    return TrainFeed(corpus.plan, replica, corpus.train.strata, train, rows), evaluated


def augment_of(data: DataConfig, *, solved: bool, mirrors: bool) -> Augment:
    """Return the views that training samples are shown in.

    Args:
        data: says --augment.
        solved: a head is fitted to them: with anything but `views:K`, which are fixed, a sample is seen as it is and,
            where `mirrors` says so, as its mirror image, unless the head itself looks at that.
        mirrors: whether mirror images are wanted.
    """
    augment = parse_augment(data.augment)
    if not solved or augment.kind == "views":
        return augment
    return MIRRORED if mirrors and data.flips != "mean" else parse_augment("none")
