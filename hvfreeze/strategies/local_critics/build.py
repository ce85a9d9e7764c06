"""Builds local critics from a configuration: layer groups, their critics, and the rank of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.point_to_point import open_wire
from hvfreeze.comm.world import LoneRank
from hvfreeze.config.tree import Config
from hvfreeze.errors import UsageError
from hvfreeze.freezing.frozen_prefix import hold_still
from hvfreeze.model.early_exits import EarlyExits, add_exits, work_until
from hvfreeze.model.modes import in_evaluation
from hvfreeze.model.segments import FORWARD_SHARE, Segment, cut_evenly, drop_tensors, work_of
from hvfreeze.prefix.cache_decision import Horizon
from hvfreeze.prefix.features import Features, Halves
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.base import BuildContext
from hvfreeze.strategies.build_parts import (
    check_not_tied,
    check_rows,
    cost_inputs,
    example_images,
    open_both_features,
    trained_segments,
)
from hvfreeze.strategies.local_critics.group import GroupPlan, LayerGroup
from hvfreeze.strategies.local_critics.line import EVALUATION, LANES, Line, LinePlan
from hvfreeze.strategies.local_critics.settings import LocalCriticsConfig
from hvfreeze.strategies.local_critics.strategy import CriticFacts, ExitCounts, LocalCritics, StepCount
from hvfreeze.strategies.model_parallel import dry_run
from hvfreeze.wording import plural


def open_local_critics(context: BuildContext, config: Config) -> LocalCritics:
    """Return the local critics strategy of a run. Collective.

    Raises:
        UsageError: settings do not fit each other, the model or the world; on all ranks.
    """
    world, chain, settings, cut = context.world, context.chain, config.optimizer, config.freeze.cut or 0
    images = example_images(context, rows=settings.batch_size)
    operations = work_of(chain, images[:1])
    exits = raise_on_all_ranks(world, lambda: open_exits(context, config, images, operations), name="critics.groups")
    costs = [cost * (FORWARD_SHARE if block < cut else 1.0) for block, cost in enumerate(operations)]

    def placed(size: int) -> Sequence[Segment]:
        return cut_evenly([sum(costs[start:stop]) for start, stop in exits.groups], parts=size)

    plan, halves, done = (
        LinePlan(exits.groups, tuple(placed(world.size))),
        Halves(chain, settings.precision),
        StepCount(),
    )
    with in_evaluation(chain.model):
        boundaries = dry_run(halves.prefix, images, depth=len(chain.blocks))
    hold_still(chain, cut)
    counts = ExitCounts(work_until(exits.work(images[:1])), sum(operations))
    features = raise_on_all_ranks(
        world,
        lambda: open_line_features(context, config, halves, done) if world.rank == 0 else None,
        name="critics.features",
    )
    groups = [
        LayerGroup(
            GroupPlan(number, exits.groups[number], max(cut, exits.groups[number][0]), config.run.seed + number),
            chain,
            exits.critics[number] if number < len(exits.critics) else None,
            settings,
            critic_lr=LocalCriticsConfig.of(config).critic_lr,
            task=context.corpus.task,
        )
        for number in range(*plan.ranks[world.rank])
    ]
    introduce(context, plan, plan.bytes_per_batch(boundaries))
    drop_other_groups(exits, plan, rank=world.rank)
    wire = open_wire(world, [*LANES, *EVALUATION])
    return LocalCritics(
        chain=chain,
        world=world,
        wire=wire,
        clock=context.clock,
        facts=CriticFacts(cut=cut, critic_every=LocalCriticsConfig.of(config).critic_every, placed=placed),
        exits=exits,
        groups=groups,
        training=Line(plan, world.rank, wire, boundaries, context.clock),
        # Seconds of an evaluation are counted as a whole, by the loop.
        evaluation=Line(plan, world.rank, wire, boundaries, PhaseClock(), EVALUATION),
        features=features,
        counts=counts,
        halves=halves,
        done=done,
    )


def open_exits(context: BuildContext, config: Config, images: Tensor, operations: Sequence[int]) -> EarlyExits:
    """Return the model's layer groups and critics, equal on all ranks; the first group has the frozen blocks.

    Raises:
        UsageError: settings do not fit each other, the model or the number of ranks.
    """
    chain, cut, rows = context.chain, config.freeze.cut or 0, config.optimizer.batch_size
    check_not_tied(context, config)
    check_rows(context, start=cut, rows=rows, asked=f"--batch-size ({rows})")
    depth, parts, ranks = len(chain.blocks), LocalCriticsConfig.of(config).parts, context.world.size
    if not 0 <= cut < depth:
        raise UsageError(f"--cut ({cut}) must be in 0..{depth - 1}, because the head is never frozen")
    if parts < ranks:
        raise UsageError(
            f"--parts ({parts}) must be at least the number of ranks ({ranks}), because each rank needs a layer "
            f"group; raise --parts, or start at most {plural(parts, 'rank')}"
        )
    starts = [start for start, _ in trained_segments(config, chain, operations, parts=parts, first=cut)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed + 1)
        return add_exits(chain, starts[1:], example=images[:2], classes=len(context.corpus.train.classes))


def open_line_features(
    context: BuildContext, config: Config, halves: Halves, done: StepCount
) -> tuple[Features, Features]:
    """Return the pipeline's input on the first rank: images, or the frozen blocks' output, which may be cached."""
    batches = context.corpus.plan.batches_per_epoch

    def horizon() -> Horizon:
        return Horizon(context.length.epochs - done.steps / batches, math.inf, done.steps // batches)

    costs = cost_inputs(context, config.cache, horizon, size=1)
    # Only this rank has a cache, so it decides alone.
    return open_both_features(context, config, halves, costs, world=LoneRank(context.world))


def drop_other_groups(exits: EarlyExits, plan: LinePlan, *, rank: int) -> None:
    """Drop the groups and critics of other ranks."""
    start, stop = plan.blocks(rank)
    drop_tensors(exits.chain, 0, start)
    drop_tensors(exits.chain, stop, len(exits.chain.blocks))
    for number, critic in enumerate(exits.critics):
        if number not in range(*plan.ranks[rank]):
            for parameter in critic.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype)


def introduce(context: BuildContext, plan: LinePlan, sent: Mapping[str, int]) -> None:
    """Log each rank's groups, and the bytes that ranks send per batch."""
    ranks = [", ".join(f"{start}..{stop - 1}" for start, stop in plan.groups[slice(*groups)]) for groups in plan.ranks]
    context.say(
        f"local critics: layer groups of blocks {' | '.join(ranks)}, each followed by a critic except the last; "
        f"bytes per batch: activations {sent['activations']}, losses {sent['losses']}"
    )
