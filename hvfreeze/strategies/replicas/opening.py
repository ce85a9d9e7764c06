"""Equal replicas made ready: the freezer with its optimizer and reducer, and the features of both splits."""

from __future__ import annotations

from functools import partial

from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.tree import Config
from hvfreeze.errors import UsageError
from hvfreeze.heads.multilevel import head_of
from hvfreeze.heads.solving import times_asked_for
from hvfreeze.prefix.features import Halves, open_features
from hvfreeze.prefix.opening import CacheTerms
from hvfreeze.prefix.splits import Recipe
from hvfreeze.ranks.agreement import together
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.caching import open_outlook
from hvfreeze.strategies.freezing import open_freezer
from hvfreeze.strategies.normalising import check_rows
from hvfreeze.strategies.replicas.door import Replicas
from hvfreeze.strategies.replicas.exchange_plan import ExchangePlan, NoPlan
from hvfreeze.strategies.replicas.measured_plan import open_plan
from hvfreeze.strategies.strategy import Materials
from hvfreeze.updates.objective import Objective
from hvfreeze.updates.update import Update, arithmetic_of, needs_equal_arithmetic


def open_replicas(materials: Materials, config: Config) -> Replicas:
    """Return the strategy for a run.

    Collective: every rank of the world must call this.

    Raises:
        UsageError: the freeze settings or the batch do not fit the model or the world; on all ranks.
    """
    world, settings = materials.world, config.optimizer
    check_arithmetic(materials, settings)
    if not config.head.solved:
        start, asked = config.freeze.cut or 0, f"--batch-size ({settings.batch_size})"
        check = partial(check_rows, materials, start=start, rows=settings.batch_size, asked=asked)
        together(world, check, name="rows")
    named = materials.chain.model.named_parameters()
    freezer = together(
        world, lambda: open_freezer(materials, named, settings, config.freeze, world=world), name="freezer"
    )
    halves = Halves(materials.chain, settings.precision)
    recipe = Recipe(batch_rows=settings.batch_size, precision=settings.precision, kept_as=config.cache.cache_dtype)
    outlook = open_outlook(materials, config.cache, settings, freezer, size=world.size)
    passes = passes_to_solve(materials, memory_bytes=outlook.memory_bytes) if config.head.solved else 1.0
    terms = CacheTerms(
        settings=config.cache,
        data=config.data,
        world=world,
        outlook=outlook,
        owner=str(materials.directory),
        say=materials.say,
    )
    trained = materials.trained(passes_per_epoch=passes)
    tested = materials.tested(passes_per_epoch=1 / config.run.evaluate_every)
    training = open_features(terms, halves, trained, recipe, clock=materials.clock)
    # Seconds of an evaluation are counted as a whole, by the loop.
    evaluation = open_features(terms, halves, tested, recipe, clock=PhaseClock())
    plan: ExchangePlan = NoPlan()
    if not config.head.solved:
        plan = open_plan(
            freezer.reducer,
            materials.clock,
            world,
            asked=settings.compression,
            accumulate=settings.accumulate,
            say=materials.say,
        )
    return Replicas(
        freezer,
        halves,
        training,
        evaluation,
        update=Update(freezer.optimizer, settings),
        objective=Objective(
            smoothing=settings.label_smoothing,
            mixup=settings.mixup,
            seed=config.data_seed,
            replica=materials.replica,
        ),
        plan=plan,
        clock=materials.clock,
        advice=advice_on(settings),
    )


def advice_on(settings: OptimizerConfig) -> str:
    """Return what a user may try where training has diverged."""
    advice = "lower --lr, or add --lr-warmup or --clip-grad"
    if settings.compression != "none":
        advice += f", or train without --compression {settings.compression}"
    return advice


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


def passes_to_solve(materials: Materials, *, memory_bytes: int) -> float:
    """Return how often all samples are asked for while the head is solved."""
    layer, batches = head_of(materials.chain), materials.feed.every_view()
    views = max(1, materials.feed.images.transform.augment.num_views)
    return float(views * times_asked_for(batches, layer, memory_bytes=memory_bytes))
