"""The parts of a run put together: its samples loaded, its card begun, its stages planned, the first one open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hvfreeze.applying.card.contents import Card, head_named
from hvfreeze.applying.card.describing import describe
from hvfreeze.chain.blocks import Chain
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import TrainFeed, open_feeds, padded_batches
from hvfreeze.data.dealing import Corpus
from hvfreeze.data.decoding import Images
from hvfreeze.freezing.cadence import Length
from hvfreeze.freezing.frozen import trainable_of
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.machine.share import memory_budget
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.strategy import Materials
from hvfreeze.torch_compiler import load_compiler
from hvfreeze.training.choice import place_of, reads_images
from hvfreeze.training.job import Job
from hvfreeze.training.making.blueprint import Blueprint, statistics_of
from hvfreeze.training.making.samples import load_feeds
from hvfreeze.training.progress import Speaker
from hvfreeze.training.stages.course import Course
from hvfreeze.training.stages.guard import Guard
from hvfreeze.training.stages.opening import Opener


def assemble(
    config: Config,
    world: World,
    directory: Path,
    blueprint: Blueprint,
    chain: Chain,
    corpus: Corpus,
    *,
    started: float = 0.0,
) -> Job:
    """Put the parts together; loads this rank's pixels. For `started` see `run`.

    Collective: every rank of `world` must call this.
    """
    replica, replicas = place_of(world, config.strategy)
    feed, evaluated = load_share(config, world, corpus)
    card = describe_model(config, world, corpus, feed)
    clock, speaker = PhaseClock(), Speaker(rank=world.rank, quiet=config.run.quiet)
    materials = Materials(
        world=world,
        replica=replica,
        replicas=replicas,
        chain=chain,
        build=lambda num_classes: blueprint.build(num_classes)[0],
        corpus=corpus,
        feed=feed,
        evaluated=evaluated,
        directory=directory,
        clock=clock,
        say=speaker.say,
        length=Length(config.optimizer.epochs),
    )
    opener = Opener(materials, config, blueprint, trainable_of(chain.model))
    share = corpus.share(replica=replica, replicas=replicas)
    evaluation_batches = padded_batches(share, corpus.evaluated.labels, config.optimizer.batch_size)
    stages = together(world, opener.stages, name="stages")
    if not all(stage.solves for stage in stages):
        # Here, and not in a step whose time is measured.
        load_compiler()
    budget = opener.budget(stages, evaluated=len(evaluation_batches), started=started)
    course = Course(budget.plan(stages), opener)
    return Job(
        config=config,
        world=world,
        directory=directory,
        block_names=tuple(block.name for block in chain.blocks) if config.freeze.auto else course.opened.block_names,
        course=course,
        budget=budget,
        guard=Guard() if config.freeze.auto and config.freeze.has("guard") else None,
        # The model that is kept has the last stage's head.
        card=replace(card, head=head_named(course.stages[-1].config.head)),
        evaluation_batches=evaluation_batches,
        replicas=replicas,
        clock=clock,
        speaker=speaker,
        notes=[],
    )


def load_share(config: Config, world: World, corpus: Corpus) -> tuple[TrainFeed, Images]:
    """Load the pixels of this rank's replica, to train on and to evaluate.

    Collective: every rank of `world` must call this.
    """
    replica, replicas = place_of(world, config.strategy)
    return load_feeds(
        world,
        lambda: open_feeds(
            corpus,
            config.data,
            seed=config.data_seed,
            replica=replica,
            replicas=replicas,
            budget_bytes=memory_budget(world.local_size) if reads_images(world, config.strategy) else 0,
            statistics=statistics_of(config.model),
            solved=config.head.solved,
            mirror=config.head.mirrors,
        ),
    )


def describe_model(config: Config, world: World, corpus: Corpus, feed: TrainFeed) -> Card:
    """Return the model's card, as far as it is known before training.

    Collective: every rank of `world` must call this.
    """
    return together(
        world,
        lambda: describe(
            config.model,
            config.head,
            config.data,
            corpus,
            feed.images.transform,
            precision=config.optimizer.precision,
            batch_size=config.optimizer.batch_size,
            hashed=world.rank == 0,
        ),
        name="card",
    )
