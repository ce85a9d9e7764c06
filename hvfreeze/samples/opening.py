"""The samples of a run: open the data, check that ranks agree, and load each rank's share of the pixels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hvfreeze.comm.agreement import check_equal, raise_on_all_ranks, read_once_per_node
from hvfreeze.comm.node_memory import protect
from hvfreeze.comm.resources import (
    memory_budget,
)
from hvfreeze.comm.world import World
from hvfreeze.config.optimizer import parse_class_weights
from hvfreeze.config.run import METRICS
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Corpus, TrainFeed, deal, open_feeds
from hvfreeze.data.data_sets import DataSplits, list_data, open_data, prepare_data, root_of
from hvfreeze.data.decoding import Images, Inputs, MemoryPixels, find_broken
from hvfreeze.data.folders import Folders, meant_by
from hvfreeze.data.images import BrokenImagesError, FileSource, count_odd
from hvfreeze.data.reading import reading_of
from hvfreeze.data.tables import columns_of
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.inference.normalisation import Normalisation, normalisation_of
from hvfreeze.row_weights import class_weights, scaled_weights
from hvfreeze.rules import rule
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.samples.node_pixels import notes_on_sharing, read_archive_once, share_pools
from hvfreeze.strategies.opening import reads_images, replicas_of
from hvfreeze.tasks import Classes, Numbers, Task
from hvfreeze.wording import did_you_mean, first_few, plural


def open_agreed_corpus(
    config: Config, world: World, *, holds_out: bool, clock: PhaseClock
) -> tuple[Corpus, dict[str, str]]:
    """Return the samples and their digests, after checking that they are equal on all ranks. Collective.

    For `holds_out` and `clock` see `open_corpus`.
    """
    replicas = raise_on_all_ranks(world, lambda: replicas_of(world, config.strategy), name="replicas")
    data, cache = config.data, config.cache
    if replicas > 1 and data.shuffle == "global" and cache.cache == "on" and not cache.cache_shared:
        raise UsageError(
            "--shuffle (global) needs --cache off or --cache-shared, because ranks exchange samples"
        ).on_all_ranks()
    corpus = open_corpus(config, world, replicas=replicas, holds_out=holds_out, clock=clock)
    remedy = "start all ranks with the same command, on equal data"
    if ":" in config.data.data:
        remedy = "the Dataset must return equal samples each time and on every rank; use --augment for random changes"
    identities = raise_on_all_ranks(world, corpus.identities, name="identities")
    check_equal(world, "data", identities, remedy=remedy)
    corpus = raise_on_all_ranks(world, lambda: with_task(config, corpus), name="task")
    if isinstance(corpus.task, Numbers):
        # Processors may round differently: all ranks use rank 0's result.
        shared = (corpus.task, corpus.train.labels, corpus.evaluated.labels)
        corpus = with_labels(corpus, *world.broadcast_object(shared, name="task.numbers"))
    with clock.within("decoding"):
        sampled = raise_on_all_ranks(world, corpus.sampled_pixels, name="sampled")
    check_equal(world, "pixels", sampled, remedy=remedy)
    return corpus, identities | {f"{split} sampled": digest for split, digest in sampled.items()}


def open_corpus(config: Config, world: World, *, replicas: int, clock: PhaseClock, holds_out: bool = False) -> Corpus:
    """Open the data and plan the shards of the replicas, without decoding. Collective.

    For `holds_out` see `deal`; `clock` measures the set-up.

    Raises:
        HvfreezeError: the data cannot be read, or are too few for the settings; on all ranks.
    """
    data = config.data
    clock.enter("listing")
    raise_on_all_ranks(
        world, lambda: prepare_data(data.data, data.data_dir) if world.local_rank == 0 else None, name="download"
    )
    root = root_of(data.data, data.data_dir).resolve()

    def look() -> tuple[Folders | None, str, dict[str, str]]:
        found = list_data(data.data, data.data_dir, columns_of(data))
        return (found.to_send(), found.digest(), found.local) if found else (None, "", {})

    folders, local = read_once_per_node(world, look, place=str(root))
    listed = folders and folders.here(root, local)
    contents, refusal = read_archive_once(data, world)
    splits = raise_on_all_ranks(
        world,
        lambda: open_data(
            data.data,
            data.data_dir,
            image_size=data.stored_size,
            listed=listed,
            contents=contents,
            reading=reading_of(data),
            skip_bad=data.skip_bad,
            context=data.context,
            task=data.task,
            columns=columns_of(data),
        ),
        name="data",
    )
    clock.enter("headers")
    splits = count_special_files(replace(splits, notes=[*splits.notes, *notes_on_sharing(refusal)]), world)
    clock.enter("decoding")
    if data.skip_bad:
        splits = without_broken(splits, world)
    clock.enter("other")
    return raise_on_all_ranks(
        world,
        lambda: deal(
            splits,
            data,
            seed=config.data_seed,
            batch_size=config.optimizer.batch_size,
            replicas=replicas,
            whole_batches=not config.head.solved,
            holds_out=holds_out,
        ),
        name="shards",
    )


def count_special_files(splits: DataSplits, world: World) -> DataSplits:
    """Count files with special conversions, and return the splits with notes on them. Collective."""
    counted, notes = {}, list[str]()
    for part, image_set in (("train", splits.train), ("test", splits.test)):
        source = image_set.source
        if isinstance(source, FileSource):
            mine = count_odd(source, share=world.rank, shares=world.size, workers=torch.get_num_threads())
            everyone = world.allgather_object(mine, name=f"odd.{part}")
            odd = {what: sum(theirs[what] for theirs in everyone) for what in mine}
            notes += [f"{count} of {len(image_set)} {part} {what}" for what, count in odd.items() if count]
            image_set = replace(image_set, source=replace(source, odd=odd))
        counted[part] = image_set
    return replace(splits, train=counted["train"], test=counted["test"], notes=[*splits.notes, *notes])


def without_broken(splits: DataSplits, world: World) -> DataSplits:
    """Return the splits without broken images, which all ranks find together. Collective.

    A note names classes without a training image.
    """
    found = {}
    for part, image_set in (("train", splits.train), ("test", splits.test)):
        look = partial(find_broken, image_set, share=world.rank, shares=world.size, workers=torch.get_num_threads())
        everyone = world.allgather_object(
            raise_on_all_ranks(world, look, name=f"broken.{part}"), name=f"broken.{part}.all"
        )
        found[part] = replace(image_set, broken={row: why for theirs in everyone for row, why in theirs.items()})
    train = found["train"]
    # Broken samples of a custom dataset have no label.
    gone, left = sorted(set(train.broken) - set(splits.train.broken)), torch.from_numpy(train.ids)
    lost = train.task.present(train.labels[gone]) & ~train.task.present(train.labels[left])
    notes = [f"class {train.classes[place]} has no readable training image" for place in lost.nonzero().flatten()]
    return replace(splits, train=train, test=found["test"], notes=[*splits.notes, *notes])


def with_task(config: Config, corpus: Corpus) -> Corpus:
    """Return the samples with the task of the models; class weights and standardisation come from training samples.

    Raises:
        UsageError: a setting does not fit the labels, or names an unknown class.
        RefusedError: all numbers to learn are equal.
    """
    check_task(config, corpus)
    given, task = parse_class_weights(config.optimizer.class_weights), corpus.task
    ids = torch.from_numpy(np.unique(np.concatenate(corpus.plan.shards)))
    if corpus.train.weights is not None:
        task = replace(task, sample_weights=scaled_weights(corpus.train.weights, ids))
    if config.run.metric is not None:
        fitting = METRICS[task.kind]
        rule(config.run.metric in fitting, "metric", config.run.metric, f"one of {', '.join(fitting)} for {task.kind}")
        task = replace(task, metric=config.run.metric.replace("-", "_"))
    if isinstance(task, Numbers):
        learned = corpus.train.labels[ids]
        if bool((learned == learned[:1]).all()):
            raise RefusedError(
                f"--data ({config.data.data}): the numbers of all {plural(len(ids), 'training sample')} are equal "
                f"({learned[0].tolist()}); training needs at least two different ones"
            )
        task, train = replace(task, huber=config.optimizer.loss == "huber").standardised(corpus.train.labels, ids)
        return with_labels(corpus, task, train, task.from_units(corpus.evaluated.labels))
    if given is None:
        return replace(corpus, task=task)
    assert isinstance(task, Classes), "refused before"
    places = {meant_by(name): place for place, name in enumerate(corpus.train.classes)}
    if isinstance(given, dict):
        for name in given:
            known = did_you_mean(name, corpus.train.classes)
            wanted = f"one of the {len(places)} classes {first_few(corpus.train.classes)}{known}"
            rule(meant_by(name) in places, "class-weights", name, wanted)
    each = None if task.sample_weights is None else task.sample_weights[ids].double()
    counts = torch.bincount(corpus.train.labels[ids], each, minlength=task.outputs)
    by_place = given if isinstance(given, str) else {places[meant_by(name)]: each for name, each in given.items()}
    return replace(corpus, task=replace(task, weights=class_weights(counts, by_place)))


def with_labels(corpus: Corpus, task: Task, train: Tensor, evaluated: Tensor) -> Corpus:
    """Return the samples with other labels."""
    held_out, trained = corpus.evaluated is corpus.train, replace(corpus.train, labels=train)
    return replace(
        corpus,
        task=task,
        train=trained,
        evaluated=trained if held_out else replace(corpus.evaluated, labels=evaluated),
    )


def check_task(config: Config, corpus: Corpus) -> None:
    """Raise UsageError for settings that do not fit the labels or the weights of the samples."""
    kind, strategy, optimizer = corpus.task.kind, config.strategy.strategy, config.optimizer
    other = kind != "classes"
    labels = {"labels": "several labels per sample", "numbers": "numbers"}.get(kind, "classes")
    for flag, value, bad, remedy in (
        ("strategy", strategy, other and not config.strategy.takes_any_labels, "use replicas, or another strategy"),
        ("class-weights", optimizer.class_weights, other and optimizer.class_weights != "none", "omit it"),
        (
            "label-smoothing",
            optimizer.label_smoothing,
            kind == "numbers" and optimizer.label_smoothing > 0,
            "omit it",
        ),
        ("loss", optimizer.loss, kind != "numbers" and "loss" in config.given, "omit it: it is for numbers"),
    ):
        if bad:
            raise UsageError(f"--{flag} ({value}) does not fit the dataset, which has {labels}; {remedy}")
    if corpus.train.weights is not None and not config.strategy.takes_weights:
        raise UsageError(
            f"--strategy ({strategy}) does not fit the dataset, which has sample weights; use --weight-column none, or "
            "another strategy"
        )


def load_share(
    config: Config, world: World, corpus: Corpus, *, replica: int, rows: int, model: nn.Module | None = None
) -> tuple[TrainFeed, Inputs, Normalisation | None, list[str]]:
    """Load the training and evaluation pixels of this rank's replica. Collective.

    Also returns, on rank 0, the normalisation, which may come with the weights of `model`; and notes.

    Ranks of a node share pixels, and each decodes a part. For `rows` see `TrainFeed`.

    Raises:
        BrokenImagesError: images are broken on some rank; names the broken images of all ranks; on all ranks.
    """
    broken: list[str] = []
    budget_bytes = memory_budget(world.local_size)
    pools, unshared = share_pools(config, world, corpus, budget_bytes=budget_bytes)
    # Rank 0's: on other nodes the card of the weights may be missing.
    found = raise_on_all_ranks(
        world, lambda: normalisation_of(config, corpus.train, model) if world.rank == 0 else None, name="statistics"
    )
    statistics = world.broadcast_object(None if found is None else found.statistics, name="statistics.of_rank_0")

    def load() -> tuple[TrainFeed, Inputs] | None:
        try:
            return open_feeds(
                corpus,
                config.data,
                seed=config.data_seed,
                replica=replica,
                budget_bytes=budget_bytes if reads_images(world, config.strategy, world.rank) else 0,
                statistics=statistics,
                fits_head=config.head.solved,
                pools=pools,
                rows=rows,
            )
        except BrokenImagesError as error:
            broken.extend(error.reasons)
            return None

    feeds = raise_on_all_ranks(world, load, name="pixels")
    everyone = world.allgather_object(broken, name="pixels.broken")
    if any(everyone):
        raise BrokenImagesError(sorted({reason for theirs in everyone for reason in theirs})).on_all_ranks()
    assert feeds is not None
    for pool in pools:
        if pool is not None:
            protect(pool.pixels)
    return *feeds, found, notes_on_sharing(unshared)


def content_of(world: World, corpus: Corpus, feed: TrainFeed, evaluated: Inputs) -> dict[str, str]:
    """Return digests of all ranks' pixels for the splits in memory, and of the normalisation. Collective.

    They detect an image that was replaced by another one of its size, unlike paths and sizes of files. The mean and
    standard deviation may come from a file next to the weights.
    """
    replica, place = divmod(world.rank, world.size // corpus.plan.replicas)
    owned = corpus.plan.owned(replica), corpus.share(replica)
    mine: dict[str, int | None] = {}
    for split, images, ids in zip(("train", "test"), (feed.images, evaluated), owned):
        pixels = images.pixels if isinstance(images, Images) else None
        # The first rank of each replica.
        mine[split] = 0 if place else pixels.content(ids) if isinstance(pixels, MemoryPixels) else None
    everyone = world.allgather_object(mine, name="content")
    found = {}
    for split in mine:
        known = [part for theirs in everyone if (part := theirs[split]) is not None]
        if len(known) == world.size:
            found[f"{split} pixels"] = f"{sum(known) % 2**64:016x}"
    if isinstance(feed.images, Images):
        found["normalisation"] = repr((feed.images.transform.mean, feed.images.transform.std))
    return found
