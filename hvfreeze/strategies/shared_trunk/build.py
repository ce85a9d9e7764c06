"""Builds a shared trunk from a configuration: each rank's segment of the trunk, and its heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hvfreeze.comm.agreement import TensorLayout, raise_on_all_ranks
from hvfreeze.comm.point_to_point import Wire, open_wire
from hvfreeze.config.tree import Config
from hvfreeze.freezing.frozen_prefix import hold_still
from hvfreeze.model.segments import RunBlocks, block_seconds, drop_tensors
from hvfreeze.prefix.cache_decision import open_budget, try_prefix
from hvfreeze.prefix.features import Halves
from hvfreeze.prefix.splits import Recipe, Split, prefix_digest
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.base import BuildContext
from hvfreeze.strategies.build_parts import check_not_tied, check_rows, cut_blocks, example_images, measured_costs
from hvfreeze.strategies.model_parallel import dry_run
from hvfreeze.strategies.shared_trunk.features import FeatureSource, TrunkFeatures
from hvfreeze.strategies.shared_trunk.line import LANES, Line, LinePlan
from hvfreeze.strategies.shared_trunk.settings import SharedTrunkConfig
from hvfreeze.strategies.shared_trunk.strategy import Head, SharedTrunk, TrunkFacts
from hvfreeze.strategies.shared_trunk.tasks import (
    Labels,
    Task,
    check_depths,
    identity_of,
    read_files,
    read_labels,
    tasks_of,
)
from hvfreeze.wording import plural

EVALUATION = "evaluation."
"""Prefix of the lanes for evaluation batches."""


def open_shared_trunk(context: BuildContext, config: Config) -> SharedTrunk:
    """Return the shared trunk strategy of a run. Collective.

    Raises:
        UsageError: settings do not fit each other, the model or the world; on all ranks.
        RefusedError: the task file cannot be read, or lacks labels; on all ranks.
    """
    world, chain, settings = context.world, context.chain, config.optimizer
    raise_on_all_ranks(world, lambda: check_not_tied(context, config), name="trunk.tied")
    tasks, labels = open_tasks(context, config)
    raise_on_all_ranks(world, lambda: check_depths(tasks, chain), name="trunk.depths")
    blocks, whole = len(chain.blocks), SharedTrunkConfig.of(config).trunk == "whole"
    cut, depth = blocks - max(task.blocks for task in tasks), blocks - min(task.blocks for task in tasks)
    rows, asked = settings.batch_size, f"--batch-size ({settings.batch_size})"
    raise_on_all_ranks(world, lambda: check_rows(context, start=cut, rows=rows, asked=asked), name="trunk.rows")
    local = range(world.rank, len(tasks), world.size)
    heads = raise_on_all_ranks(
        world,
        lambda: [Head(tasks[i], labels[i], settings, build=context.build) for i in local],
        name="trunk.heads",
    )
    hold_still(chain, blocks)
    halves = Halves(chain, settings.precision)
    images = example_images(context, rows=settings.batch_size)
    boundaries = dry_run(halves.prefix, images, depth=depth)
    plan = open_plan(context, SharedTrunkConfig.of(config), tasks, halves.prefix, images, depth=depth)
    place = plan.place_of(0 if whole else world.rank)
    segment = (0, 0) if place is None else plan.segments[place]
    cached = config.cache.cache != "off" and config.data.cacheable()
    facts = TrunkFacts(
        names=tuple(task.name for task in tasks),
        classes=tuple(each.classes for each in labels),
        segments=plan.segments,
        whole=whole,
        labels=plan.labels,
        cut=cut,
        depth=depth,
        identity={"tasks": identity_of(tasks, labels), "trunk": prefix_digest(chain, depth)},
        cache=config.cache.cache if cached else "off",
        exact=not cached or raise_on_all_ranks(world, lambda: is_exact(halves, context, depth), name="trunk.exact"),
    )
    training, evaluation = open_both_features(context, halves, facts, plan, boundaries, labels)
    introduce(context.say, plan, boundaries, facts)
    if config.model.weights == "none":
        context.say("note: the trunk is randomly initialised; use --weights for a pretrained trunk")

    def settle_in() -> None:
        """Open the stored features, then drop all blocks except this rank's segment. Collective."""
        budget = open_budget(config.cache, context.cache_directory(config.cache), size=world.size)
        for features in (training, evaluation):
            if cached:
                features.open_stores(context, config.cache, Recipe.of(config), budget=budget, exact=facts.exact)
        for features in (training, evaluation):
            features.source.whole = False
        drop_tensors(chain, 0, segment[0])
        drop_tensors(chain, segment[1], blocks)

    return SharedTrunk(
        chain=chain,
        world=world,
        wire=training.line.wire,
        clock=context.clock,
        facts=facts,
        segment=segment,
        heads=heads,
        training=training,
        evaluation=evaluation,
        settle_in=settle_in,
    )


def open_tasks(context: BuildContext, config: Config) -> tuple[list[Task], list[Labels]]:
    """Return the tasks and their labels; only rank 0 reads the files. Collective."""
    world, settings = context.world, SharedTrunkConfig.of(config)
    plan = partial(tasks_of, settings, config.optimizer, seed=config.run.seed, ranks=world.size)

    def read() -> tuple[list[Task], list[Labels]] | None:
        if settings.tasks is None:
            tasks, table = plan(), None
        elif world.rank > 0:
            return None
        else:
            files = read_files(Path(settings.tasks))
            tasks, table = plan(files=files), files[1]
        return tasks, read_labels(tasks, table, context.corpus)

    found = raise_on_all_ranks(world, read, name="trunk.tasks")
    found = found if settings.tasks is None else world.broadcast_object(found, name="trunk.labels")
    assert found is not None, "rank 0 has read the files"
    return found


def open_plan(
    context: BuildContext, settings: SharedTrunkConfig, tasks: list[Task], run: RunBlocks, images: Tensor, *, depth: int
) -> LinePlan:
    """Return the plan of the pipeline; with whole trunks each rank is a pipeline with one place. Collective."""
    world, blocks = context.world, len(context.chain.blocks)
    shares = [range(rank, len(tasks), world.size) for rank in range(world.size)]
    depths = tuple(tuple(sorted({blocks - tasks[i].blocks for i in share})) for share in shares)
    if settings.trunk == "whole":
        rank = world.rank
        return LinePlan(((0, depth),), depths[rank : rank + 1], (tuple(shares[rank]),))
    costs = measured_costs(context, settings, partial(block_seconds, run, images, depth=depth))[:depth]
    cut = partial(cut_blocks, settings, costs, parts=world.size, fewer=True)
    segments = raise_on_all_ranks(world, cut, name="trunk.segments")
    return LinePlan(segments, depths, tuple(map(tuple, shares)), settings.labels)


def is_exact(halves: Halves, context: BuildContext, depth: int) -> bool:
    """Return True if a row's bits do not depend on its place in a batch, tested with one batch."""
    images = context.feed.images
    ids = np.resize(context.corpus.plan.shards[context.replica], context.corpus.plan.batch_size)
    batch = images.load(ids, np.zeros_like(ids))
    return try_prefix(lambda x: halves.prefix(x, 0, depth), batch).exact


def open_both_features(
    context: BuildContext,
    halves: Halves,
    facts: TrunkFacts,
    plan: LinePlan,
    boundaries: list[TensorLayout],
    labels: list[Labels],
) -> tuple[TrunkFeatures, TrunkFeatures]:
    """Return the features of training and of evaluation. Collective."""
    world = context.world
    lanes_of_both = [prefix + lane for prefix in ("", EVALUATION) for lane in LANES]
    wire = Wire(lanes_of_both) if facts.whole else open_wire(world, lanes_of_both)
    rank = 0 if facts.whole else world.rank

    def features(split: Split, clock: PhaseClock, *, lanes: str, plan: LinePlan) -> TrunkFeatures:
        line = Line(
            plan=plan,
            rank=rank,
            wire=wire,
            boundaries=boundaries,
            run=halves.prefix,
            load=lambda batch: split.images.load(batch.ids, batch.views),
            labels_of=lambda batch: torch.stack([each.of(batch, training=True) for each in labels]),
            clock=clock,
            lanes=lanes,
        )
        return TrunkFeatures(line, FeatureSource(split, halves), world)

    silent = replace(plan, labels="replay")
    # Seconds of an evaluation are counted as a whole, by the loop.
    return (
        features(context.trained(), context.clock, lanes="", plan=plan),
        features(context.tested(), PhaseClock(), lanes=EVALUATION, plan=silent),
    )


def introduce(say: Callable[[str], None], plan: LinePlan, boundaries: list[TensorLayout], facts: TrunkFacts) -> None:
    """Log each rank's part."""
    names = ", ".join(facts.names)
    if facts.whole:
        say(f"shared trunk: every rank runs the whole trunk; {plural(len(facts.names), 'model')}: {names}")
        return
    cuts = ", ".join(f"{start}..{stop - 1}" for start, stop in plan.segments)
    sent = plan.bytes_per_batch(boundaries, rows=boundaries[0].shape[0])
    say(
        f"shared trunk: segments {cuts}; labels {plan.labels}; bytes per computed batch: "
        f"{', '.join((f'{lane} {number}' for lane, number in sent.items()))}; {plural(len(facts.names), 'model')}: "
        f"{names}"
    )
