"""A run made ready: everything that the training loop uses, built the same way on every rank."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from hvfreeze.agreement import (
    broadcast_model,
    check_equal,
    crowding,
    threads_of_environment,
    threads_per_rank,
    together,
)
from hvfreeze.blocks import Chain, cut_into_blocks
from hvfreeze.cache.budget import Budget
from hvfreeze.cache.files import directory_bytes
from hvfreeze.cacheinputs import Outlook, Split
from hvfreeze.caching import open_caching
from hvfreeze.clock import PhaseClock
from hvfreeze.config import Config
from hvfreeze.configfile import to_dict
from hvfreeze.data import DataSplits, ImageSet, open_data, prepare_data
from hvfreeze.evaluation import Evaluator, Totals
from hvfreeze.feed import Ids, Images, TrainFeed, evaluation_ids, memory_budget, padded_batches
from hvfreeze.formats import set_memory_formats
from hvfreeze.freezing import Freezer
from hvfreeze.models import build_model
from hvfreeze.pixels import load_pixels
from hvfreeze.prefix import Halves, Prefix
from hvfreeze.record import (
    PER_RANK,
    NullRecord,
    Record,
    choose_directory,
    claim_directory,
    describe_environment,
    open_record,
    version_of,
)
from hvfreeze.reducer import Reducer
from hvfreeze.shards import ShardPlan, plan_shards, split_validation, stratified_subset
from hvfreeze.signals import Voter, coverage
from hvfreeze.tracks import Cadence
from hvfreeze.views import Augment, Transform, parse_augment, transform_for
from hvfreeze.world import World

# What torchvision's own weights were trained with, mean and standard deviation.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass
class Job:
    """The parts of a run, and how far it is."""

    config: Config
    world: World
    directory: Path
    chain: Chain
    optimizer: torch.optim.Optimizer
    reducer: Reducer
    freezer: Freezer
    feed: TrainFeed
    prefix: Prefix
    evaluator: Evaluator
    clock: PhaseClock
    notes: list[str]
    steps_per_epoch: int
    record: Record | NullRecord = field(default_factory=NullRecord)
    data_identities: dict[str, str] = field(default_factory=dict)
    step: int = 0
    epochs_done: int = 0
    epoch_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase at the end of the last epoch that was recorded."""
    best_accuracy: float = 0.0
    last_accuracy: float = 0.0
    totals: Totals = field(default_factory=Totals)
    asked_to_leave: bool = False

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps_per_epoch * self.config.optimizer.epochs


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


def prepare(config: Config, world: World) -> Job:
    """Build a run from its configuration.

    Collective: every rank of `world` must call this.

    Raises:
        HvfreezeError: the configuration, the data, the weights or the run directory cannot be used, on all ranks.
    """
    check_equal(world, "configuration", to_dict(config), apart=PER_RANK)
    # Collective, hence called also where its result is not needed: environments may differ between hosts.
    share = threads_per_rank(world)
    torch.set_num_threads(config.run.threads or threads_of_environment() or share)
    check_equal(world, "versions", {name: version_of(name) for name in ("torch", "horovod", "hvfreeze")})
    directory = choose_directory(config, world)
    together(world, lambda: claim_directory(directory, config) if world.rank == 0 else None, name="directory")
    corpus = open_corpus(config, world)
    identities = together(world, corpus.identities, name="identities")
    check_equal(world, "data", identities)
    if config.model.weights == "DEFAULT":
        # One rank per node downloads; the others find the file.
        together(world, lambda: build_chain(config, corpus) if world.local_rank == 0 else None, name="weights")
    chain, notes = together(world, lambda: build_chain(config, corpus), name="model")
    broadcast_model(chain.model, world)
    if world.rank > 0:
        torch.manual_seed(config.run.seed + world.rank)
    job = assemble(config, world, directory, chain, corpus, [*corpus.notes, *notes, *crowding(world)])
    job.data_identities = identities
    environment = describe_environment(world)
    # Last, so that a run that could not start leaves its directory as it was.
    job.record = together(
        world,
        lambda: open_record(directory, config, environment=environment) if world.rank == 0 else NullRecord(),
        name="record",
    )
    return job


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


def build_chain(config: Config, corpus: Corpus) -> tuple[Chain, list[str]]:
    """Build the model from the run's seed, for channels_last images, in blocks; with what the user should know."""
    torch.manual_seed(config.run.seed)
    channels, height, width = corpus.train.image_shape
    size = config.data.image_size
    built = build_model(
        config.model.model,
        num_classes=len(corpus.train.classes),
        weights=config.model.weights,
        image_size=size or max(height, width),
    )
    set_memory_formats(built.model, (channels, size or height, size or width))
    return cut_into_blocks(built.model, scheme=config.model.blocks), built.notes


def assemble(
    config: Config,
    world: World,
    directory: Path,
    chain: Chain,
    corpus: Corpus,
    notes: list[str],
) -> Job:
    """Put the parts together; loads this rank's pixels.

    Collective: every rank of `world` must call this.
    """
    settings, clock = config.optimizer, PhaseClock()
    reducer = Reducer(world, compression=settings.compression)
    optimizer = torch.optim.SGD(
        chain.model.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    steps = corpus.plan.steps_per_epoch
    shard_labels = corpus.train.labels[torch.from_numpy(corpus.plan.shards[world.rank])]
    freezer = together(
        world,
        lambda: Freezer(
            chain,
            optimizer=optimizer,
            reducer=reducer,
            world=world,
            settings=config.freeze,
            cadence=Cadence.of(config.freeze, steps_per_epoch=steps, num_epochs=settings.epochs),
            voter=Voter(samples=len(shard_labels), coverage=coverage(shard_labels.tolist(), len(corpus.train.classes))),
        ),
        name="freezer",
    )
    feed, evaluation = together(world, lambda: open_feeds(config, world, corpus), name="pixels")
    prefix, evaluator = open_halves(config, world, directory, corpus, freezer, feed, evaluation, clock)
    return Job(
        config=config,
        world=world,
        directory=directory,
        chain=chain,
        optimizer=optimizer,
        reducer=reducer,
        freezer=freezer,
        feed=feed,
        prefix=prefix,
        evaluator=evaluator,
        clock=clock,
        notes=notes,
        steps_per_epoch=steps,
    )


def open_halves(
    config: Config,
    world: World,
    directory: Path,
    corpus: Corpus,
    freezer: Freezer,
    feed: TrainFeed,
    evaluation: Images,
    clock: PhaseClock,
) -> tuple[Prefix, Evaluator]:
    """Return how activations are had in training and in evaluation; both pay from one budget."""
    settings, chain = config.optimizer, freezer.chain
    halves = Halves(chain, settings.precision)
    place = Path(config.cache.cache_dir) if config.cache.cache_dir else directory / "cache"
    outlook = Outlook(freezer, clock, open_budget(config, place, size=world.size), place)
    stored = corpus.plan.shards[world.rank]
    if config.data.shuffle == "global":
        stored = stored[world.rank :: world.size]
    share = corpus.share(world)

    def say(text: str) -> None:
        if world.rank == 0:
            tqdm.write(text, file=sys.stdout)

    def prefix(name: str, image_set: ImageSet, images: Images, ids: Ids, clock: PhaseClock) -> Prefix:
        caching = open_caching(
            config,
            chain,
            world,
            Split(name, image_set.identity(), images, ids),
            outlook=outlook,
            clock=clock,
            run_blocks=halves.run,
            owner=str(directory),
            say=say,
        )
        return Prefix(halves, images, caching)

    train = prefix("train", corpus.train, feed.images, stored, clock)
    test = prefix("test", corpus.evaluated, evaluation, share, PhaseClock())
    batches = padded_batches(share, corpus.evaluated.labels, settings.batch_size)
    return train, Evaluator(chain, world, test, batches)


def open_budget(config: Config, place: Path, *, size: int) -> Budget:
    """Return one rank's share of --cache-limit, of which files that are there already have used their part."""
    limit = config.cache.limit_bytes()
    return Budget(None if limit is None else max(0, limit - directory_bytes(place)) // size)


def open_feeds(config: Config, world: World, corpus: Corpus) -> tuple[TrainFeed, Images]:
    """Load the pixels of this rank's training and evaluation samples."""
    augment = parse_augment(config.data.augment)
    shard = corpus.plan.shards[world.rank]
    share = corpus.share(world)
    train = open_images(config, corpus.train, shard, augment, local_size=world.local_size)
    evaluated = open_images(config, corpus.evaluated, share, parse_augment("none"), local_size=world.local_size)
    return TrainFeed(corpus.plan, world.rank, corpus.train.labels, train), evaluated


def open_images(config: Config, image_set: ImageSet, ids: Any, augment: Augment, *, local_size: int) -> Images:
    """Return the images of `ids`, in memory where they fit and streamed where not."""
    transform: Transform = transform_for(
        image_set, augment=augment, data_seed=config.data_seed, image_size=config.data.image_size
    )
    if config.model.weights == "DEFAULT":
        transform = replace(transform, mean=IMAGENET[0], std=IMAGENET[1])
    workers = max(1, torch.get_num_threads())
    pixels = load_pixels(image_set, ids, budget_bytes=memory_budget(local_size), workers=workers)
    return Images(pixels, transform)
