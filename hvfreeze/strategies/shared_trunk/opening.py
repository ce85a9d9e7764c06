"""From a configuration to the strategy: which ranks get which part of the trunk, and which heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hvfreeze.chain.segments import Boundary, RunBlocks, Segment, block_seconds, drop_tensors, dry_run
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.sections import CacheConfig
from hvfreeze.config.strategy import StrategyConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch
from hvfreeze.prefix.features import Halves
from hvfreeze.prefix.measuring import open_budget, try_prefix
from hvfreeze.prefix.splits import Recipe, Split, prefix_digest
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.wire import LoopWire, Wire, open_wire
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.cutting import example_images, open_segments
from hvfreeze.strategies.normalising import check_rows
from hvfreeze.strategies.shared_trunk.account import Facts
from hvfreeze.strategies.shared_trunk.features import Handed, TrunkFeatures, caches, open_stores
from hvfreeze.strategies.shared_trunk.heads import Head, hold_still
from hvfreeze.strategies.shared_trunk.labels import Labels, identity_of, read_labels
from hvfreeze.strategies.shared_trunk.line import LANES, Line, Plan
from hvfreeze.strategies.shared_trunk.strategy import SharedTrunk
from hvfreeze.strategies.shared_trunk.tasks import Task, check_depths, check_settings, read_files, tasks_of
from hvfreeze.strategies.strategy import Materials

EVALUATION = "evaluation."
"""Put before the names of the lanes on which evaluation batches travel."""


def open_shared_trunk(materials: Materials, config: Config) -> SharedTrunk:
    """Return the strategy for a run.

    Collective: every rank of the world must call this.

    Raises:
        UsageError: settings do not fit each other, the model or the world; on all ranks.
        RefusedError: the task file cannot be read, or lacks labels; on all ranks.
    """
    world, chain, settings = materials.world, materials.chain, config.optimizer
    together(world, lambda: check_settings(config.freeze, config.optimizer, config.cache), name="trunk.settings")
    tasks, labels = open_tasks(materials, config.strategy, settings, seed=config.run.seed)
    together(world, lambda: check_depths(tasks, chain), name="trunk.depths")
    blocks, whole = len(chain.blocks), config.strategy.trunk == "whole"
    cut, depth = blocks - max(task.blocks for task in tasks), blocks - min(task.blocks for task in tasks)
    rows, asked = settings.batch_size, f"--batch-size ({settings.batch_size})"
    together(world, lambda: check_rows(materials, start=cut, rows=rows, asked=asked), name="trunk.rows")
    mine = range(world.rank, len(tasks), world.size)
    heads = together(
        world,
        lambda: [Head(tasks[i], labels[i], settings, build=materials.build) for i in mine],
        name="trunk.heads",
    )
    hold_still(chain, (0, blocks))
    halves = Halves(chain, settings.precision)
    images = example_images(materials, rows=settings.batch_size)
    boundaries = dry_run(halves.prefix, images, depth=depth)
    plan = open_plan(materials, config.strategy, tasks, halves.prefix, images, depth=depth)
    place = plan.place_of(0 if whole else world.rank)
    segment = (0, 0) if place is None else plan.segments[place]
    cached = caches(config.cache, config.data)
    recipe = Recipe(batch_rows=settings.batch_size, precision=settings.precision, kept_as=config.cache.cache_dtype)
    facts = Facts(
        names=tuple(task.name for task in tasks),
        classes=tuple(each.classes for each in labels),
        segments=plan.segments,
        whole=whole,
        labels=plan.labels,
        cut=cut,
        depth=depth,
        identity={"tasks": identity_of(tasks, labels), "trunk": prefix_digest(chain, depth)},
        cache=config.cache.cache if cached else "off",
        exact=not cached or together(world, lambda: is_exact(halves, materials, depth), name="trunk.exact"),
    )
    training, evaluation = open_both_features(materials, halves, facts, plan, boundaries, labels)
    introduce(materials.say, plan, boundaries, facts)
    if config.cache.cache == "auto" and not cached:
        materials.say("cache auto: off, because with this --augment no row would be read again")
    if config.model.weights == "none":
        materials.say("note: the trunk keeps its random initialisation; --weights gives it one that was trained")
    return SharedTrunk(
        facts,
        chain,
        segment,
        heads,
        training,
        evaluation,
        world=world,
        clock=materials.clock,
        settle_in=lambda: settle_in(materials, config.cache, recipe, plan, segment, (training, evaluation), facts),
    )


def settle_in(
    materials: Materials,
    settings: CacheConfig,
    recipe: Recipe,
    plan: Plan,
    segment: Segment,
    both: tuple[TrunkFeatures, TrunkFeatures],
    facts: Facts,
) -> None:
    """Open what is stored, then let go of all blocks but this rank's segment. Collective."""
    place = materials.place(settings)
    budget = open_budget(settings, place, size=materials.world.size)
    for features in both:
        if facts.cache != "off":
            features.stores = open_stores(
                materials,
                settings,
                recipe,
                features.handed,
                features.line.clock,
                place=place,
                budget=budget,
                depths=plan.depths[features.line.rank],
                exact=facts.exact,
            )
    for features in both:
        features.handed.whole = False
    drop_tensors(materials.chain, 0, segment[0])
    drop_tensors(materials.chain, segment[1], len(materials.chain.blocks))


def open_tasks(
    materials: Materials, settings: StrategyConfig, optimizer: OptimizerConfig, *, seed: int
) -> tuple[list[Task], list[Labels]]:
    """Return the tasks and their labels; only rank 0 reads the files. Collective."""
    world, path = materials.world, settings.tasks
    found = together(
        world, lambda: read_files(Path(path)) if path is not None and world.rank == 0 else ("", ""), name="trunk.read"
    )
    files = world.broadcast_object(found, name="trunk.files")
    tasks = together(
        world, lambda: tasks_of(settings, optimizer, seed=seed, ranks=world.size, files=files), name="trunk.tasks"
    )
    return tasks, together(world, lambda: read_labels(tasks, files[1], materials.corpus), name="trunk.labels")


def open_plan(
    materials: Materials, settings: StrategyConfig, tasks: list[Task], run: RunBlocks, images: Tensor, *, depth: int
) -> Plan:
    """Return who computes what. With whole trunks each rank is a line of its own, and has the one place. Collective."""
    world, blocks = materials.world, len(materials.chain.blocks)
    shares = [range(rank, len(tasks), world.size) for rank in range(world.size)]
    depths = tuple(tuple(sorted({blocks - tasks[i].blocks for i in share})) for share in shares)
    if settings.trunk == "whole":
        rank = world.rank
        return Plan(((0, depth),), depths[rank : rank + 1], (tuple(shares[rank]),))
    segments = open_segments(
        materials, settings, lambda: block_seconds(run, images, depth=depth), depth=depth, parts=world.size
    )
    return Plan(segments, depths, tuple(map(tuple, shares)), settings.labels or "replay")


def is_exact(halves: Halves, materials: Materials, depth: int) -> bool:
    """Tell whether a row's bits do not depend on its place in a batch, tried with one batch."""
    images = materials.feed.images
    ids = np.resize(materials.corpus.plan.shards[materials.replica], materials.corpus.plan.batch_size)
    batch = images.load(ids, np.zeros_like(ids))
    return try_prefix(lambda x: halves.prefix(x, 0, depth), batch).exact


def open_both_features(
    materials: Materials,
    halves: Halves,
    facts: Facts,
    plan: Plan,
    boundaries: list[Boundary],
    labels: list[Labels],
) -> tuple[TrunkFeatures, TrunkFeatures]:
    """Return how features are had in training and in evaluation. Collective."""
    world = materials.world
    lanes_of_both = [prefix + lane for prefix in ("", EVALUATION) for lane in LANES]
    wire: Wire = LoopWire(lanes_of_both) if facts.whole else open_wire(world, lanes_of_both)
    rank = 0 if facts.whole else world.rank

    def features(split: Split, clock: PhaseClock, *, lanes: str, policy: Plan) -> TrunkFeatures:
        line = Line(
            plan=policy,
            rank=rank,
            wire=wire,
            boundaries=boundaries,
            run=halves.prefix,
            load=lambda batch: split.images.load(batch.ids, batch.views),
            labels_of=lambda batch: table(labels, batch),
            clock=clock,
            lanes=lanes,
        )
        return TrunkFeatures(split.name, line, None, Handed(split, halves), world, reads_images=rank == 0)

    silent = replace(plan, labels="replay")
    # Seconds of an evaluation are counted as a whole, by the loop.
    return (
        features(materials.trained(), materials.clock, lanes="", policy=plan),
        features(materials.tested(), PhaseClock(), lanes=EVALUATION, policy=silent),
    )


def table(labels: list[Labels], batch: Batch) -> Tensor:
    """Return all tasks' labels of a training batch, (tasks, B) int64."""
    return torch.stack([each.of(batch, training=True) for each in labels])


def introduce(say: Callable[[str], None], plan: Plan, boundaries: list[Boundary], facts: Facts) -> None:
    """Tell the user who does what."""
    names = ", ".join(facts.names)
    if facts.whole:
        say(f"shared trunk: every rank runs the whole trunk; {len(facts.names)} models: {names}")
        return
    cuts = ", ".join(f"{start}..{stop - 1}" for start, stop in plan.segments)
    sent = plan.bytes_per_batch(boundaries, rows=boundaries[0].shape[0])
    say(
        f"shared trunk: segments {cuts}; labels {plan.labels}; bytes a batch that the line runs for: "
        f"{', '.join(f'{lane} {number}' for lane, number in sent.items())}; {len(facts.names)} models: {names}"
    )
