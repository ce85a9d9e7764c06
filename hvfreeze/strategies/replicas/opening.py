"""Equal replicas made ready: the freezer with its optimizer and reducer, and the features of both splits."""

from __future__ import annotations

from pathlib import Path

import torch

from hvfreeze.config.tree import Config
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.freezing.vote_weights import Voter, coverage
from hvfreeze.heads.multilevel import head_of
from hvfreeze.heads.solving import times_asked_for
from hvfreeze.prefix.features import Features, Halves, open_features
from hvfreeze.prefix.measuring import Horizon, Outlook, open_budget, suffix_seconds
from hvfreeze.prefix.splits import Recipe, Split
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.machine.share import memory_budget
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.replicas.door import Replicas
from hvfreeze.strategies.strategy import Materials


def open_replicas(materials: Materials, config: Config) -> Replicas:
    """Return the strategy for a run.

    Collective: every rank of the world must call this.

    Raises:
        UsageError: the freeze settings do not fit the model or the world; on all ranks.
    """
    freezer = together(materials.world, lambda: open_freezer(materials, config), name="freezer")
    halves = Halves(materials.chain, config.optimizer.precision)
    training, evaluation = open_both_features(materials, config, freezer, halves)
    advice = "lower --lr or add --lr-warmup"
    if config.optimizer.compression != "none":
        advice += f", or train without --compression {config.optimizer.compression}"
    return Replicas(freezer, halves, training, evaluation, clock=materials.clock, advice=advice)


def open_freezer(materials: Materials, config: Config) -> Freezer:
    """Return the freezer, with the optimizer and the reducer that it keeps in step with the cut."""
    settings, corpus, chain = config.optimizer, materials.corpus, materials.chain
    optimizer = torch.optim.SGD(
        chain.model.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    steps = settings.steps_per_epoch(corpus.plan.batches_per_epoch)
    labels = corpus.train.labels[torch.from_numpy(corpus.plan.shards[materials.replica])]
    return Freezer(
        chain,
        optimizer=optimizer,
        reducer=Reducer(materials.world, compression=settings.compression),
        world=materials.world,
        settings=config.freeze,
        cadence=Cadence.of(config.freeze, steps_per_epoch=steps, num_epochs=settings.epochs),
        voter=Voter(samples=len(labels), coverage=coverage(labels.tolist(), len(corpus.train.classes))),
    )


def passes_to_solve(materials: Materials) -> float:
    """Return how often all samples are asked for while the head is solved."""
    memory_bytes, views = memory_budget(materials.world.local_size), materials.feed.images.transform.augment.num_views
    layer, batches = head_of(materials.chain), materials.feed.every_view()
    return float(max(1, views) * times_asked_for(batches, layer, memory_bytes=memory_bytes))


def open_both_features(
    materials: Materials, config: Config, freezer: Freezer, halves: Halves
) -> tuple[Features, Features]:
    """Return how features are had in training and in evaluation; both pay from one budget."""
    corpus, world, settings = materials.corpus, materials.world, config.optimizer
    per_epoch = corpus.plan.batches_per_epoch

    def batches_trained(steps: int) -> float:
        return steps * per_epoch / settings.steps_per_epoch(per_epoch)

    place = Path(config.cache.cache_dir) if config.cache.cache_dir else materials.directory / "cache"
    outlook = Outlook(
        horizon=lambda: Horizon(freezer.epochs_left, freezer.epochs_until_move()),
        suffix_seconds=lambda: suffix_seconds(materials.clock, batches=batches_trained(freezer.step)),
        budget=open_budget(config.cache, place, size=world.size),
        directory=place,
        memory_bytes=memory_budget(world.local_size),
    )
    recipe = Recipe(batch_rows=settings.batch_size, precision=settings.precision, kept_as=config.cache.cache_dtype)
    share = {"replica": materials.replica, "replicas": materials.replicas}
    train = Split(
        name="train",
        image_set=corpus.train,
        images=materials.feed.images,
        ids=corpus.owned(**share),
        passes_per_epoch=passes_to_solve(materials) if config.head.exact else 1.0,
    )
    test = Split(
        name="test",
        image_set=corpus.evaluated,
        images=materials.evaluated,
        ids=corpus.share(**share),
        passes_per_epoch=1 / config.run.evaluate_every,
    )

    def features(split: Split, clock: PhaseClock) -> Features:
        return open_features(
            config.cache,
            config.data,
            halves,
            world,
            split,
            recipe,
            outlook=outlook,
            clock=clock,
            owner=str(materials.directory),
            say=materials.say,
        )

    # Seconds of an evaluation are counted as a whole, by the loop.
    return features(train, materials.clock), features(test, PhaseClock())
