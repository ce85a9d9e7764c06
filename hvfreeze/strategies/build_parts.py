"""Builders of parts that several strategies use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.resources import memory_budget
from hvfreeze.comm.world import World
from hvfreeze.config.cache import CacheConfig
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.strategy import CutConfig
from hvfreeze.config.tree import TEXT_STRATEGIES, Config
from hvfreeze.data.views import blank, seen_shape
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.freezing.gradients import Join
from hvfreeze.freezing.vote import Voter, coverage
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation
from hvfreeze.model.segments import Segment, cut_at, cut_evenly, segment_bytes, work_of
from hvfreeze.optim import open_optimizer
from hvfreeze.prefix.cache_decision import CostInputs, Horizon, open_budget
from hvfreeze.prefix.features import CacheTerms, Features, Halves, open_features
from hvfreeze.prefix.splits import Recipe
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.base import BuildContext


def cost_inputs(
    context: BuildContext, settings: CacheConfig, horizon: Callable[[], Horizon], *, size: int
) -> CostInputs:
    """Return the cost inputs of cache planning; training and evaluation share one budget.

    --cache-limit is divided by `size` ranks.
    """
    directory = context.cache_directory(settings)
    return CostInputs(
        horizon=horizon,
        budget=open_budget(settings, directory, size=size),
        directory=directory,
        memory_bytes=memory_budget(context.world.local_size),
    )


def open_cost_inputs(context: BuildContext, config: Config, freezer: Freezer, *, size: int) -> CostInputs:
    """Return the cost inputs of a strategy whose cut `freezer` moves; see `cost_inputs`."""

    def horizon() -> Horizon:
        epoch = freezer.cadence.epoch(freezer.step)
        return Horizon(freezer.epochs_left, freezer.epochs_until_move(), epoch)

    return cost_inputs(context, config.cache, horizon, size=size)


def open_both_features(
    context: BuildContext, config: Config, halves: Halves, costs: CostInputs, *, world: World, passes: float = 1.0
) -> tuple[Features, Features]:
    """Return the features (output of frozen blocks) in training and evaluation, on ranks of `world` with all blocks.

    An epoch uses the training samples `passes` times. Collective.
    """
    terms = CacheTerms(
        settings=config.cache,
        data=config.data,
        mixed=context.corpus.plan.mixes,
        world=world,
        costs=costs,
        owner=str(context.directory),
        say=context.say,
    )
    evaluating = Recipe.of(config, context.feed.rows)
    training = evaluating if config.head.solved else Recipe.of(config)
    split = replace(context.trained(passes_per_epoch=passes), padded=config.head.solved)
    trained = halves.rows_of(split, training)
    tested = halves.rows_of(context.tested(passes_per_epoch=1 / config.run.evaluate_every), evaluating)
    # Seconds of an evaluation are counted as a whole, by the loop.
    return open_features(terms, trained, clock=context.clock), open_features(terms, tested, clock=PhaseClock())


def example_images(context: BuildContext, *, rows: int) -> Tensor:
    """Return black images, or empty windows, of a training batch's shape and memory format; see `blank`."""
    return blank(seen_shape(context.corpus.train.image_shape, context.feed.images.transform.image_size), rows=rows)


def measured_costs(
    context: BuildContext, settings: CutConfig, measure: Callable[[], Sequence[float]]
) -> Sequence[float]:
    """Return each block's cost by --cut-by; by default the seconds that `measure` returns on rank 0. Collective.

    For strategies whose result does not depend on where they are cut: times differ between ranks and runs.
    """
    if settings.cut_by in ("params", "count"):
        return counted_costs(context.chain, settings.cut_by)
    world = context.world
    return world.broadcast_object(list(measure()) if world.rank == 0 else [], name="cutting.seconds")


def counted_costs(chain: Chain, by: str) -> list[float]:
    """Return each block's cost by --cut-by `params` or `count`."""
    blocks = range(len(chain.blocks))
    return [float(segment_bytes(chain, (block, block + 1))) if by == "params" else 1.0 for block in blocks]


def cut_blocks(
    settings: CutConfig,
    costs: Sequence[float],
    *,
    parts: int,
    first: int = 0,
    fewer: bool = False,
    by_compute: Callable[..., tuple[Segment, ...]] = cut_evenly,
) -> tuple[Segment, ...]:
    """Cut the blocks from `first` on into `parts` segments: at --cut-at, or else with similar sums of `costs`.

    `costs` has an entry per block. `by_compute` cuts them if --cut-by is `compute`; with `fewer`, --cut-at may give
    fewer segments.

    Raises:
        UsageError: --cut-at does not fit.
    """
    if settings.cut_by == "given":
        return cut_at(settings.starts(), depth=len(costs), parts=parts, first=first, fewer=fewer)
    cut = by_compute if settings.cut_by == "compute" else cut_evenly
    return tuple((first + start, first + stop) for start, stop in cut(costs[first:], parts=parts))


def trained_segments(
    config: Config,
    chain: Chain,
    operations: Sequence[float],
    *,
    parts: int,
    first: int = 0,
    by_compute: Callable[..., tuple[Segment, ...]] = cut_evenly,
    what: str = "part",
) -> tuple[Segment, ...]:
    """Cut the blocks from `first` on into `parts` segments, if the cuts affect the result of training.

    Equal runs must be equal, so no clock is used: `operations` are counted, see `work_of`, and `by_compute` cuts by
    them. `what` is the noun for a segment in messages.

    Raises:
        UsageError: there are too few blocks, --cut-at does not fit, or a segment has no parameters to train.
    """
    settings = CutConfig.of(config)
    check_parts(config, parts, blocks=len(chain.blocks) - first)
    costs = counted_costs(chain, settings.cut_by) if settings.cut_by in ("params", "count") else operations
    segments = cut_blocks(settings, costs, parts=parts, first=first, by_compute=by_compute)
    check_parameters(chain, segments, what=what)
    return segments


def open_freezer(
    context: BuildContext,
    named: Iterable[tuple[str, nn.Parameter]],
    settings: OptimizerConfig,
    freeze: FreezeConfig,
    *,
    world: World,
    held: Segment | None = None,
    join: Join = list,
) -> Freezer:
    """Return a freezer for `named` parameters, whose gradients `world` exchanges and whose ranks vote.

    Raises:
        UsageError: the freeze settings do not fit the model or the number of ranks.
    """
    corpus, chain = context.corpus, context.chain
    head = {name for name, _ in chain.named_parameters(len(chain.blocks) - 1)}
    steps = settings.steps_per_epoch(corpus.plan.batches_per_epoch)
    # A rank that holds only some of the blocks cannot run the others.
    weighs = held is None and "coherence" in freeze.criteria()
    strata = corpus.train.strata[corpus.plan.shards[context.replica]].tolist()
    return Freezer(
        chain,
        optimizer=open_optimizer(named, settings, head=head, fused=context.fused),
        reducer=Reducer(world, compression=settings.compression),
        world=world,
        settings=freeze,
        cadence=Cadence.of(freeze, steps_per_epoch=steps, num_epochs=context.length.epochs, plan=context.length),
        voter=Voter(samples=len(strata), coverage=coverage(strata, corpus.train.task.num_strata)),
        held=held,
        join=join,
        work=work_of(chain, example_images(context, rows=1)) if weighs else (),
    )


def check_parts(config: Config, parts: int, *, blocks: int) -> None:
    """Raise UsageError if there are more parts than blocks."""
    if parts > blocks:
        raise UsageError(
            f"--parts ({parts}) must be at most {blocks}, the number of blocks of {config.model.model} with "
            f"--blocks {config.model.blocks}; use fewer parts or ranks, or finer --blocks"
        )


def check_parameters(chain: Chain, segments: Sequence[Segment], *, what: str = "part", frozen: bool = False) -> None:
    """Raise UsageError if a segment has no trainable parameters; with `frozen`, user-frozen parameters count."""
    for start, stop in segments:
        if not any(frozen or parameter.requires_grad for _, parameter in chain.named_parameters(start, stop)):
            names = ", ".join(block.name for block in chain.blocks[start:stop])
            raise UsageError(
                f"--parts ({len(segments)}): one {what} ({names}) has no parameters to train; choose other cuts "
                "with --cut-at"
            )


def check_not_tied(context: BuildContext, config: Config) -> None:
    """Raise UsageError if the first and the last block share parameters, and a strategy trains them separately."""
    if context.chain.tied:
        raise UsageError(
            f"--strategy ({config.strategy.strategy}) must be {', '.join(TEXT_STRATEGIES)} for this model: its "
            f"first and last block share {context.chain.tied[0]}, so they must be on one rank"
        )


@torch.no_grad()
def check_rows(context: BuildContext, *, start: int, rows: int, asked: str) -> None:
    """Raise UsageError if a batch of one sample would make a trained block's BatchNorm normalise a single value.

    `start` is the first trained block, `rows` the samples of the smallest training batch, `asked` the settings that
    determine it, for the message. Running statistics and modes do not change.

    Raises:
        UsageError: the BatchNorm of such a block cannot be trained.
    """
    if rows > 1:
        return
    chain, images = context.chain, example_images(context, rows=1)
    single, hooks = [], []

    def look(module: Any, given: Any) -> None:
        if given[0].numel() == given[0].shape[1]:
            single.append(module)

    try:
        for module in chain.modules(start):
            if isinstance(module, _BatchNorm):
                hooks.append(module.register_forward_pre_hook(look))
        with in_evaluation(chain.model):
            chain.run(images, 0, len(chain.blocks))
    finally:
        for hook in hooks:
            hook.remove()
    if single:
        name = next(name for name, module in chain.model.named_modules() if module is single[0])
        raise UsageError(
            f"{asked} must leave at least 2 samples per batch for images of {images.shape[2]}x{images.shape[3]} "
            f"pixels, because BatchNorm {name} would normalise a single value; or use a larger --image-size"
        )
