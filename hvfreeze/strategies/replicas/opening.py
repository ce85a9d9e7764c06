"""Equal replicas made ready: the freezer with its optimizer and reducer, and the features of both splits."""

from __future__ import annotations

from pathlib import Path

import torch

from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.tree import Config
from hvfreeze.errors import UsageError
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
from hvfreeze.updates.objective import Objective
from hvfreeze.updates.update import Update, arithmetic_of, needs_equal_arithmetic, open_optimizer


def open_replicas(materials: Materials, config: Config) -> Replicas:
    """Return the strategy for a run.

    Collective: every rank of the world must call this.

    Raises:
        UsageError: the freeze settings do not fit the model or the world; on all ranks.
    """
    check_arithmetic(materials, config.optimizer)
    freezer = together(materials.world, lambda: open_freezer(materials, config), name="freezer")
    halves = Halves(materials.chain, config.optimizer.precision)
    training, evaluation = open_both_features(materials, config, freezer, halves)
    advice = "lower --lr, or add --lr-warmup or --clip-grad"
    if config.optimizer.compression != "none":
        advice += f", or train without --compression {config.optimizer.compression}"
    return Replicas(
        freezer,
        halves,
        training,
        evaluation,
        update=Update(freezer.optimizer, config.optimizer),
        objective=Objective(
            smoothing=config.optimizer.label_smoothing,
            mixup=config.optimizer.mixup,
            seed=config.data_seed,
            replica=materials.replica,
        ),
        clock=materials.clock,
        advice=advice,
    )


def check_arithmetic(materials: Materials, settings: OptimizerConfig) -> None:
    """Refuse ranks whose norms of equal tensors have other bits, where updates depend on norms. Collective."""
    if not needs_equal_arithmetic(settings):
        return
    mine = arithmetic_of(tuple(parameter.shape) for parameter in materials.chain.model.parameters())
    digests = materials.world.allgather_object(mine, name="arithmetic")
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        error = UsageError(
            f"--clip-grad and --optimizer lars: rank {odd[0]} computes other norms than rank 0 from equal numbers, and "
            "replicas would drift apart; give all ranks equal processors and --threads, or use sgd or adamw unclipped"
        )
        error.everywhere = True
        raise error


def open_freezer(materials: Materials, config: Config) -> Freezer:
    """Return the freezer, with the optimizer and the reducer that it keeps in step with the cut."""
    settings, corpus, chain = config.optimizer, materials.corpus, materials.chain
    head = {name for name, _ in chain.named_parameters(len(chain.blocks) - 1)}
    (head_lr,) = settings.head_rates() or [settings.lr]
    optimizer = open_optimizer(chain.model.named_parameters(), settings, head=head, head_lr=head_lr)
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
