"""A run made ready: everything that the training loop uses, built the same way on every rank."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.file.names import directory_bytes
from hvfreeze.chain.blocks import Chain, cut_into_blocks
from hvfreeze.chain.memory_formats import set_memory_formats
from hvfreeze.chain.models import build_model
from hvfreeze.config.tree import Config, to_dict
from hvfreeze.data.batches import Corpus, open_corpus, open_feeds
from hvfreeze.data.datasets import ImageSet
from hvfreeze.data.feed import Ids, Images, TrainFeed, padded_batches
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.freezing.gradients import Voter, coverage
from hvfreeze.freezing.proposer import Cadence
from hvfreeze.prefix.caching import open_caching
from hvfreeze.prefix.features import Halves, Prefix
from hvfreeze.prefix.measuring import Outlook, Split
from hvfreeze.ranks.agreement import check_equal, together
from hvfreeze.ranks.equal_models import broadcast_model
from hvfreeze.ranks.machine.share import crowding, threads_of_environment, threads_per_rank
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.runs.record import (
    PER_RANK,
    NullRecord,
    Record,
    choose_directory,
    claim_directory,
    describe_environment,
    open_record,
    version_of,
)
from hvfreeze.training.evaluation import Evaluator, Totals


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

    def prefix(
        name: str, image_set: ImageSet, images: Images, ids: Ids, clock: PhaseClock, *, passes: float = 1.0
    ) -> Prefix:
        caching = open_caching(
            config,
            chain,
            world,
            Split(name, image_set.identity(), images, ids, passes),
            outlook=outlook,
            clock=clock,
            run_blocks=halves.run,
            owner=str(directory),
            say=say,
        )
        return Prefix(halves, images, caching)

    train = prefix("train", corpus.train, feed.images, stored, clock)
    passes = 1 / config.run.evaluate_every
    test = prefix("test", corpus.evaluated, evaluation, share, PhaseClock(), passes=passes)
    batches = padded_batches(share, corpus.evaluated.labels, settings.batch_size)
    return train, Evaluator(chain, world, test, batches)


def open_budget(config: Config, place: Path, *, size: int) -> Budget:
    """Return one rank's share of --cache-limit, of which files that are there already have used their part."""
    limit = config.cache.limit_bytes()
    return Budget(None if limit is None else max(0, limit - directory_bytes(place)) // size)
