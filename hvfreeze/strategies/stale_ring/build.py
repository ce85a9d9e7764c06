"""Builds a stale ring from a configuration: where the model is cut, and each rank's modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

from torch import Tensor

from hvfreeze.comm.agreement import TensorLayout, raise_on_all_ranks
from hvfreeze.comm.point_to_point import open_wire
from hvfreeze.config.tree import Config
from hvfreeze.model.modes import in_evaluation
from hvfreeze.model.segments import Segment, cut_evenly, drop_tensors, work_of
from hvfreeze.optim import Objective, Update, open_optimizer
from hvfreeze.prefix.features import Halves
from hvfreeze.strategies.base import BuildContext
from hvfreeze.strategies.build_parts import check_rows, example_images, trained_segments
from hvfreeze.strategies.model_parallel import dry_run
from hvfreeze.strategies.schedules import ring_period
from hvfreeze.strategies.stale_ring.module import RingModule
from hvfreeze.strategies.stale_ring.settings import StaleRingConfig
from hvfreeze.strategies.stale_ring.strategy import EVALUATION, LANES, RingFacts, StaleRing
from hvfreeze.wording import plural

MOST_CUTS = 200_000
WARM_UP = 10
"""Without --stale-after, 1/WARM_UP of an epoch's steps use undelayed gradients."""


def open_stale_ring(context: BuildContext, config: Config) -> StaleRing:
    """Return the stale ring of a run. Collective.

    Raises:
        UsageError: settings do not fit each other, the model or the world; on all ranks.
    """
    world, chain, settings = context.world, context.chain, config.optimizer
    images = example_images(context, rows=settings.batch_size)
    facts = raise_on_all_ranks(world, lambda: facts_of(context, config, images[:1]), name="ring.settings")
    halves = Halves(chain, settings.precision)
    with in_evaluation(chain.model):
        boundaries = dry_run(halves.prefix, images, depth=len(chain.blocks))
    last = facts.parts - 1
    modules = {
        part: RingModule(part, facts.segments[part], halves, facts.tied if part == last else ())
        for part in facts.parts_of(world.rank)
    }
    introduce(context, facts, boundaries)
    local = [facts.segments[part] for part in modules]
    # Each module stays whole on one rank, and so do the parameters that both ends share.
    for part, segment in enumerate(facts.segments):
        if part not in modules:
            drop_tensors(chain, *segment)
    named = [pair for segment in local for pair in chain.named_parameters(*segment)]
    head = {name for name, _ in chain.named_parameters(len(chain.blocks) - 1)}
    optimizer = open_optimizer(named, settings, head=head)
    return StaleRing(
        chain=chain,
        world=world,
        wire=open_wire(world, [*LANES, EVALUATION]),
        clock=context.clock,
        clip_grad=settings.clip_grad,
        facts=facts,
        modules=modules,
        halves=halves,
        boundaries=boundaries,
        images=(context.feed.images, context.evaluated),
        # The norm of --clip-grad is that of all modules together, which no rank has alone.
        update=Update(optimizer, replace(settings, clip_grad=None)),
        objective=Objective(task=context.corpus.task, smoothing=settings.label_smoothing),
    )


def facts_of(context: BuildContext, config: Config, images: Tensor) -> RingFacts:
    """Return the facts of the ring, equal on all ranks.

    Raises:
        UsageError: settings do not fit each other or the model.
    """
    rows = config.optimizer.batch_size
    check_rows(context, start=0, rows=rows, asked=f"--batch-size ({rows})")
    settings, chain = StaleRingConfig.of(config), context.chain
    parts, given = settings.modules(context.world.size), settings.stale_after
    return RingFacts(
        segments=trained_segments(
            config, chain, work_of(chain, images), parts=parts, by_compute=cut_for_ring, what="module"
        ),
        stale_after=context.corpus.plan.batches_per_epoch // WARM_UP if given is None else given,
        tied=chain.tied,
        tied_gradient=settings.tied_gradient,
    )


def cut_for_ring(costs: Sequence[float], *, parts: int) -> tuple[Segment, ...]:
    """Return the modules with the shortest step; rank 0 has two modules, which are smaller than the others.

    Of equally fast divisions, take the one with the smallest largest module. With more than `MOST_CUTS` divisions, cut
    the blocks evenly instead.
    """
    depth = len(costs)
    if math.comb(depth - 1, parts - 1) > MOST_CUTS:
        return cut_evenly(costs, parts=parts)
    until = [0.0, *accumulate(costs)]

    def price(starts: tuple[int, ...]) -> tuple[float, float]:
        modules = [until[stop] - until[start] for start, stop in pairwise((0, *starts, depth))]
        return ring_period(modules), max(modules)

    starts = min(combinations(range(1, depth), parts - 1), key=price)
    return tuple(pairwise((0, *starts, depth)))


def introduce(context: BuildContext, facts: RingFacts, boundaries: Sequence[TensorLayout]) -> None:
    """Log each module's blocks and delay, and the bytes that ranks send per batch."""
    modules = ", ".join(
        f"{start}..{stop - 1} on rank {facts.rank_of(part)}, delay {plural(facts.delay(part), 'step')}"
        for part, (start, stop) in enumerate(facts.segments)
    )
    sent = sum(boundaries[start].num_bytes for start, _ in facts.segments[1:])
    context.say(
        f"stale ring: blocks {modules}; no delay for the first {plural(facts.stale_after, 'step')}; bytes per "
        f"batch: activations {sent}, gradients {sent}, labels 0"
    )
    if facts.tied:
        way = "the sum" if facts.tied_gradient == "sum" else "half the sum"
        context.say(f"stale ring: both ends share {', '.join(facts.tied)}; its gradient is {way} of the two")
    else:
        context.say(
            "note: the first and the last block share no parameters, so the ring only keeps the labels on rank 0"
        )
