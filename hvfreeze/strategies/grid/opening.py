"""From a configuration to the strategy: where each rank stands, which blocks it gets, and what trains them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.segments import Boundary, Segment
from hvfreeze.config.tree import Config
from hvfreeze.data.decoding import Images
from hvfreeze.errors import UsageError
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.freezing.gradients import Join
from hvfreeze.prefix.features import Halves
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.mesh import open_line, open_mesh
from hvfreeze.ranks.wire import open_wire
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.cutting import example_images, open_segments
from hvfreeze.strategies.freezing import open_freezer
from hvfreeze.strategies.grid.account import Facts
from hvfreeze.strategies.grid.pipeline import EVALUATION, LANES, Pipeline
from hvfreeze.strategies.grid.strategy import Grid
from hvfreeze.strategies.grid.trial import Trial, sizes_of, try_blocks
from hvfreeze.strategies.strategy import Materials
from hvfreeze.updates.objective import Objective


def open_grid(materials: Materials, config: Config) -> Grid:
    """Return the strategy for a run.

    Collective: every rank of the world must call this.

    Raises:
        UsageError: settings do not fit each other, the model or the world; on all ranks.
    """
    world = materials.world
    facts = together(world, lambda: facts_of(config, materials), name="grid.settings")
    halves = Halves(materials.chain, config.optimizer.precision)
    trials = together(world, lambda: try_sizes(materials, config, halves, facts), name="grid.trial")
    segments = open_segments(
        materials,
        config.strategy,
        lambda: trials[min(trials)].seconds,
        depth=len(materials.chain.blocks),
        parts=facts.parts,
    )
    together(world, lambda: check_segments(segments, facts, config, materials.chain), name="grid.segments")
    mesh = open_mesh(world, partitions=facts.parts)
    line = open_line(mesh) if facts.parts > 1 and observes(config) else None
    boundaries = {rows: trial.boundaries for rows, trial in trials.items()}
    wire = open_wire(world, [*LANES, EVALUATION])

    def pipeline(images: Images, clock: PhaseClock) -> Pipeline:
        return Pipeline(
            plan=facts.plan_of(segments),
            mesh=mesh,
            halves=halves,
            wire=wire,
            boundaries=boundaries,
            load=lambda batch: images.load(batch.ids, batch.views),
            objective=Objective(smoothing=config.optimizer.label_smoothing),
            clock=clock,
        )

    introduce(materials, facts, segments, boundaries[config.optimizer.batch_size])
    images = (materials.feed.images, materials.evaluated)

    def train(segment: Segment) -> Freezer:
        return open_freezer(
            materials,
            materials.chain.named_parameters(*segment),
            config.optimizer,
            config.freeze,
            world=mesh.replica_world,
            held=segment,
            join=join_of(line),
        )

    def opened() -> Grid:
        return Grid(
            facts,
            mesh,
            pipeline(images[0], materials.clock),
            # Seconds of an evaluation are counted as a whole, by the loop.
            pipeline(images[1], PhaseClock()),
            images,
            open_freezer=train,
            settings=config.optimizer,
            world=world,
            clock=materials.clock,
        )

    return together(world, opened, name="grid.freezer")


def facts_of(config: Config, materials: Materials) -> Facts:
    """Return the grid's shape.

    Raises:
        UsageError: settings do not fit each other, or the model.
    """
    settings, rows, blocks = config.strategy, config.optimizer.batch_size, len(materials.chain.blocks)
    parts = settings.grid_parts(materials.world.size)
    check_settings(config)
    if parts > blocks:
        raise UsageError(
            f"--parts ({parts}) must be at most {blocks}, the blocks of {config.model.model} with --blocks "
            f"{config.model.blocks}; use fewer parts, or finer --blocks"
        )
    number = settings.micro_batches
    if number is not None and number > rows:
        raise UsageError(f"--micro-batches ({number}) must be at most --batch-size ({rows})")
    if number is None:
        # Two samples at least: BatchNorm cannot normalise one.
        number = max(1, min(2 * parts, rows // 2)) if parts > 1 else 1
    return Facts(
        parts=parts,
        replicas=materials.world.size // parts,
        micro_batches=number,
        schedule=settings.pipeline or "1f1b",
    )


def check_settings(config: Config) -> None:
    """Refuse settings of which nothing could come."""
    kind = config.optimizer.compression.partition(":")[0]
    for flag, value, fits, why in (
        ("cache", config.cache.cache, config.cache.cache == "off", "a grid keeps no activations"),
        ("mixup", config.optimizer.mixup, config.optimizer.mixup == 0, "no rank has both images and labels of pairs"),
        ("compression", config.optimizer.compression, kind in ("none", "fp16"), "choose fp16 or none"),
        ("optimizer", config.optimizer.optimizer, config.optimizer.optimizer != "lars", "choose sgd or adamw"),
    ):
        if not fits:
            raise UsageError(f"--{flag} ({value}) must be left out with --strategy grid: {why}")


def try_sizes(materials: Materials, config: Config, halves: Halves, facts: Facts) -> dict[int, Trial]:
    """Return what a step is like with each number of samples that goes through the line at once."""
    images = example_images(materials, rows=config.optimizer.batch_size)
    rows = {*sizes_of(len(images), facts.micro_batches), len(images)}
    return {number: try_blocks(materials.chain, halves.part, images[:number]) for number in sorted(rows)}


def check_segments(segments: Sequence[Segment], facts: Facts, config: Config, chain: Chain) -> None:
    """Refuse cuts that leave a rank without parameters."""
    if len(segments) < facts.parts:
        raise UsageError(
            f"--cut-at ({config.strategy.cut_at}) must be {facts.parts - 1} numbers with --parts {facts.parts}"
        )
    for start, stop in segments:
        if not chain.named_parameters(start, stop):
            names = ", ".join(block.name for block in chain.blocks[start:stop])
            raise UsageError(
                f"--parts ({facts.parts}): one part, {names}, has no parameters; cut it elsewhere (--cut-at)"
            )


def observes(config: Config) -> bool:
    """Tell whether ranks of a line must put together what they have observed."""
    return config.freeze.freeze not in ("none", "static") or bool(config.freeze.shadow_names())


def join_of(line: World | None) -> Join:
    """Return what adds up the observations of a line's ranks, each of its own blocks."""
    if line is None:
        return list

    def join(mine: Sequence[float]) -> list[float]:
        summed: list[float] = line.allreduce_sum(torch.tensor(mine, dtype=torch.float64), name="grid.join").tolist()
        return summed

    return join


def introduce(materials: Materials, facts: Facts, segments: tuple[Segment, ...], batch: Sequence[Boundary]) -> None:
    """Tell the user who does what."""
    cuts = ", ".join(f"{start}..{stop - 1}" for start, stop in segments)
    sent = facts.plan_of(segments).bytes_per_step(batch, cut=0)
    materials.say(
        f"grid: {facts.parts} parts (blocks {cuts}) x {facts.replicas} replicas, {facts.micro_batches} micro-batches, "
        f"{facts.schedule}; bytes a step in a line: {', '.join(f'{lane} {number}' for lane, number in sent.items())}"
    )
