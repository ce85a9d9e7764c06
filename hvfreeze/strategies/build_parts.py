"""Parts that several strategies are built from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.resources import memory_budget
from hvfreeze.comm.world import World
from hvfreeze.config.section import CutConfig
from hvfreeze.config.sections import FreezeConfig, OptimizerConfig
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
from hvfreeze.prefix.cache_decision import CostInputs, Horizon, behind_prefix, open_budget, suffix_seconds
from hvfreeze.prefix.features import CacheTerms, Features, Halves, open_features
from hvfreeze.prefix.splits import Recipe
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.base import BuildContext


def open_cost_inputs(context: BuildContext, config: Config, freezer: Freezer, *, size: int) -> CostInputs:
    """Return the costs by which the cache is planned; training and evaluation pay from its one budget.

    --cache-limit is shared by `size` ranks.
    """
    directory, per_epoch = context.cache_directory(config.cache), context.corpus.plan.batches_per_epoch
    batches_of_a_step = per_epoch / config.optimizer.steps_per_epoch(per_epoch)

    def horizon() -> Horizon:
        epoch = freezer.cadence.epoch(freezer.step)
        return Horizon(freezer.epochs_left, freezer.epochs_until_move(), epoch)

    before = behind_prefix(context.clock)
    return CostInputs(
        horizon=horizon,
        suffix_seconds=lambda: suffix_seconds(context.clock, batches=freezer.step * batches_of_a_step, before=before),
        budget=open_budget(config.cache, directory, size=size),
        directory=directory,
        memory_bytes=memory_budget(context.world.local_size),
    )


def open_both_features(
    context: BuildContext, config: Config, halves: Halves, costs: CostInputs, *, world: World, passes: float = 1.0
) -> tuple[Features, Features]:
    """Return the frozen blocks' output in training and in evaluation, on ranks of `world` that have all blocks.

    An epoch asks for the training samples `passes` times. Collective.
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


def open_segments(
    context: BuildContext,
    settings: CutConfig,
    measure: Callable[[], Sequence[float]],
    *,
    depth: int,
    parts: int,
    fewer: bool = False,
) -> tuple[Segment, ...]:
    """Return `parts` segments of the first `depth` blocks, the same on all ranks. Collective.

    They are alike by --cut-by, or begin at --cut-at; there may be `fewer`. `measure` returns each block's seconds; only
    rank 0's count.

    Raises:
        UsageError: --cut-at does not fit.
    """
    if settings.cut_by == "given":
        given = partial(cut_at, settings.starts(), depth=depth, parts=parts, fewer=fewer)
        return raise_on_all_ranks(context.world, given, name="cutting.given")
    return cut_evenly(block_costs(context, settings, measure)[:depth], parts=parts)


def block_costs(context: BuildContext, settings: CutConfig, measure: Callable[[], Sequence[float]]) -> Sequence[float]:
    """Return each block's cost by --cut-by, seconds where cuts are given; the same on all ranks. Collective."""
    world, by = context.world, settings.cut_by
    if by in ("params", "count"):
        return counted_costs(context.chain, by)
    # Times differ between ranks and runs; where the cut is changes no bit.
    return world.broadcast_object(list(measure()) if world.rank == 0 else [], name="cutting.seconds")


def counted_costs(chain: Chain, by: str) -> list[float]:
    """Return each block's cost by --cut-by `params` or `count`."""
    blocks = range(len(chain.blocks))
    return [float(segment_bytes(chain, (block, block + 1))) if by == "params" else 1.0 for block in blocks]


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
    """Return `parts` segments of the blocks from `first` on, where cuts decide what is trained.

    No clock has a say, so that equal runs are equal: `operations` are counted, see `work_of`, and `by_compute` cuts by
    them. `what` is a segment's name for the user.

    Raises:
        UsageError: there are too few blocks, --cut-at does not fit, or a segment has no parameters to train.
    """
    settings, depth = CutConfig.of(config), len(chain.blocks)
    check_parts(config, parts, blocks=depth - first)
    if settings.cut_by == "given":
        segments = cut_at(settings.starts(), depth=depth, parts=parts, first=first)
    else:
        by, costs, cut = settings.cut_by, operations, by_compute
        if by in ("params", "count"):
            costs, cut = counted_costs(chain, by), cut_evenly
        segments = tuple((first + start, first + stop) for start, stop in cut(costs[first:], parts=parts))
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
    """Return the freezer of `named` parameters, which `world` exchanges and votes on.

    Raises:
        UsageError: the freeze settings do not fit the model or the number of ranks.
    """
    corpus, chain = context.corpus, context.chain
    head = {name for name, _ in chain.named_parameters(len(chain.blocks) - 1)}
    steps = settings.steps_per_epoch(corpus.plan.batches_per_epoch)
    # A rank that holds some blocks only cannot run the others.
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
    """Refuse more parts than there are blocks to share out."""
    if parts > blocks:
        raise UsageError(
            f"--parts ({parts}) must be at most {blocks}, the blocks of {config.model.model} that are shared out with "
            f"--blocks {config.model.blocks}; use fewer parts or ranks, or finer --blocks"
        )


def check_parameters(chain: Chain, segments: Sequence[Segment], *, what: str = "part", frozen: bool = False) -> None:
    """Refuse segments that have nothing to train; with `frozen`, what the user has frozen is enough."""
    for start, stop in segments:
        if not any(frozen or parameter.requires_grad for _, parameter in chain.named_parameters(start, stop)):
            names = ", ".join(block.name for block in chain.blocks[start:stop])
            raise UsageError(
                f"--parts ({len(segments)}): one {what}, {names}, has no parameters to train; cut the model elsewhere "
                "(--cut-at)"
            )


def check_not_tied(context: BuildContext, config: Config) -> None:
    """Refuse a model whose ends share parameters, where a strategy trains them apart."""
    if context.chain.tied:
        raise UsageError(
            f"--strategy ({config.strategy.strategy}) must be {', '.join(TEXT_STRATEGIES)} with this model: its first "
            f"and its last block share {context.chain.tied[0]}, which one rank must train as a whole"
        )


@torch.no_grad()
def check_rows(context: BuildContext, *, start: int, rows: int, asked: str) -> None:
    """Refuse batches of one sample where a block from `start` on, which train, would normalise a single value of it.

    `rows` are the samples of the smallest training batch, `asked` names the settings that make them so many. Running
    statistics and modes stay as they are.

    Raises:
        UsageError: such a block's BatchNorm could not be trained.
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
            f"{asked} must leave at least 2 samples to a batch with images of {images.shape[2]}x{images.shape[3]} "
            f"pixels: BatchNorm {name} would normalise a single value; or give a larger --image-size"
        )
