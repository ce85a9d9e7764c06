"""Which samples of a data set are trained and evaluated on, and how they are dealt to replicas.

Ranks are known here as `replica` of `replicas`: all ranks that work on one batch together are one replica.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvfreeze.config.sections import DataConfig
from hvfreeze.data.draws import Ids
from hvfreeze.data.on_disk.broken import listed
from hvfreeze.data.sets.image_set import DataSplits, ImageSet
from hvfreeze.data.shards import ShardPlan, plan_shards, split_validation, stratified_subset


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

    def sampled_pixels(self) -> dict[str, str]:
        """Return digests of a few decoded images: other files of the same names and sizes give others."""
        return {"train": self.train.sample_digest(), "test": self.evaluated.sample_digest()}

    def share(self, *, replica: int, replicas: int) -> Ids:
        """Return the samples that `replica` evaluates: every sample in exactly one replica."""
        return self.evaluated_ids[replica::replicas]

    def owned(self, *, replica: int, replicas: int) -> Ids:
        """Return the training samples that `replica` is to store, if any: every sample in exactly one replica."""
        shard = self.plan.shards[replica]
        # Dealt anew in every epoch, all samples are in every shard.
        return shard[replica::replicas] if self.plan.shuffle == "global" else shard


def choose(splits: DataSplits, data: DataConfig, *, seed: int) -> tuple[Ids, ImageSet, Ids]:
    """Return the training samples' ids, the split that is evaluated, and which of its samples are.

    Raises:
        UsageError: there are fewer samples than the settings ask for.
    """
    train, labels = splits.train, splits.train.labels.numpy()
    ids = train.ids
    if data.train_samples is not None:
        ids = ids[stratified_subset(labels[ids], data.train_samples, seed=seed)]
    if data.validation_fraction > 0:
        ids, held_out = split_validation(labels, ids, fraction=data.validation_fraction, seed=seed)
        return ids, train, held_out
    return ids, splits.test, splits.test.ids


def notes_on_broken(splits: DataSplits) -> list[str]:
    """Return a line about the images that are left out, where there are some."""
    reasons = [reason for part in (splits.train, splits.test) for reason in part.broken.values()]
    return [f"{len(reasons)} images cannot be decoded and are left out: {listed(reasons)}"] if reasons else []


def deal(
    splits: DataSplits, data: DataConfig, *, seed: int, batch_size: int, replicas: int, whole_batches: bool = True
) -> Corpus:
    """Choose training and evaluation samples and plan the shards; nothing is decoded.

    With `whole_batches` the notes tell which samples fill no batch; without, the run uses batches that are not full.

    Raises:
        UsageError: the samples do not suffice for what the settings ask.
    """
    ids, evaluated, evaluated_ids = choose(splits, data, seed=seed)
    plan = plan_shards(
        splits.train.labels.numpy(),
        ids,
        size=replicas,
        batch_size=batch_size,
        seed=seed,
        shuffle=data.shuffle,
        partition=data.partition,
        shard_sizes=data.shard_sizes,
    )
    notes = [*splits.notes, *notes_on_broken(splits)]
    if data.validation_fraction > 0:
        notes.append(f"{len(evaluated_ids)} training samples are held out; accuracy is on them, not on the test set")
    dropped = len(ids) - plan.batches_per_epoch * batch_size * replicas
    if dropped > 0 and whole_batches:
        notes.append(
            f"each epoch leaves out {dropped} of {len(ids)} training samples, others each time: "
            f"{plan.batches_per_epoch} whole batches of {batch_size} are made of every shard"
        )
    return Corpus(splits.train, evaluated, evaluated_ids, plan, notes)
