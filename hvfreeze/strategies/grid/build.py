"""Builds a grid from a configuration: each rank's place, its blocks, and what trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.comm.agreement import TensorLayout, raise_on_all_ranks
from hvfreeze.comm.mesh import open_line, open_mesh
from hvfreeze.comm.point_to_point import open_wire
from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config
from hvfreeze.data.decoding import Inputs
from hvfreeze.errors import UsageError
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.freezing.gradients import Join
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import state_kept
from hvfreeze.model.segments import RunBlocks, Segment, block_seconds
from hvfreeze.optim import Objective
from hvfreeze.prefix.cache_decision import CostInputs
from hvfreeze.prefix.features import Halves
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.base import BuildContext
from hvfreeze.strategies.build_parts import (
    block_costs,
    check_not_tied,
    check_parameters,
    check_parts,
    check_rows,
    example_images,
    open_cost_inputs,
    open_freezer,
    open_segments,
)
from hvfreeze.strategies.grid.cached_rows import REMOTE_ROWS, CachedRows, FrozenDigests, RemotePrefix, keeps_rows
from hvfreeze.strategies.grid.partitioning import (
    MOVING,
    GridFacts,
    LocalStage,
    Partitioning,
    Place,
    shorter_lines,
    sizes_of,
)
from hvfreeze.strategies.grid.pipeline import EVALUATION, LANES, Pipeline
from hvfreeze.strategies.grid.settings import GridConfig
from hvfreeze.strategies.grid.strategy import Grid


def open_grid(context: BuildContext, config: Config) -> Grid:
    """Return the grid of a run. Collective.

    Raises:
        UsageError: settings do not fit each other, the model or the world; on all ranks.
    """
    world, chain, settings = context.world, context.chain, config.optimizer
    facts = raise_on_all_ranks(world, lambda: facts_of(config, context), name="grid.settings")
    halves = Halves(chain, settings.precision)
    trials = raise_on_all_ranks(world, lambda: try_sizes(context, config, halves, facts), name="grid.trial")

    def seconds() -> Sequence[float]:
        return trials[min(trials)].seconds

    segments = open_segments(context, GridConfig.of(config), seconds, depth=len(chain.blocks), parts=facts.parts)
    raise_on_all_ranks(world, lambda: check_parameters(chain, segments, frozen=True), name="grid.segments")
    costs = block_costs(context, GridConfig.of(config), seconds)
    places = open_places(world, facts, observing=observes(config))
    boundaries = {rows: trial.boundaries for rows, trial in trials.items()}
    introduce(context, facts, segments, boundaries[settings.batch_size])
    if facts.repartitions and GridConfig.of(config).cut_by not in ("params", "count"):
        context.say(
            "grid: with --redeal on, parts are cut by times measured at each start, and the last digits of results "
            "depend on the cuts: a repeated or resumed run may differ; --cut-by params or count makes runs "
            "repeatable"
        )
    keeps = raise_on_all_ranks(world, lambda: keeps_rows(config, facts, world), name="grid.rows")
    wire = open_wire(world, [*LANES, EVALUATION, REMOTE_ROWS, MOVING])

    def train(place: Place, segment: Segment) -> Freezer:
        return open_freezer(
            context,
            chain.named_parameters(*segment),
            settings,
            config.freeze,
            world=place.mesh.replica_world,
            held=segment,
            join=join_of(place.line),
        )

    opened = partial(
        LocalStage,
        facts,
        Partitioning(segments),
        places,
        chain,
        wire,
        open_freezer=train,
        settings=settings,
        costs=costs,
    )
    stage = raise_on_all_ranks(world, opened, name="grid.freezer")
    digests = FrozenDigests(world, chain)
    pipelines = open_pipelines(context, config, stage, digests, halves, boundaries, keeps=keeps)
    return Grid(
        chain=chain,
        world=world,
        wire=wire,
        clock=context.clock,
        clip_grad=settings.clip_grad,
        facts=facts,
        stage=stage,
        pipelines=pipelines,
        images=(context.feed.images, context.evaluated),
        digests=digests,
        say=context.say,
    )


def open_pipelines(
    context: BuildContext,
    config: Config,
    stage: LocalStage,
    digests: FrozenDigests,
    halves: Halves,
    boundaries: Mapping[int, Sequence[TensorLayout]],
    *,
    keeps: bool,
) -> tuple[Pipeline, Pipeline]:
    """Return this rank's pipelines, of training and of evaluation. Not a collective."""
    cost_inputs: dict[Partitioning, CostInputs] = {}

    def present_cost_inputs() -> CostInputs:
        # Both splits pay from one budget.
        now = stage.partitioning
        if now not in cost_inputs:
            cost_inputs[now] = open_cost_inputs(context, config, stage.freezer, size=stage.mesh.replicas)
        return cost_inputs[now]

    def remote(reader: int) -> RemotePrefix:
        now = stage.partitioning.segments
        return RemotePrefix(stage.mesh, now, reader, halves=halves, wire=stage.wire, boundaries=boundaries)

    def pipeline(name: str, images: Inputs, clock: PhaseClock) -> Pipeline:
        return Pipeline(
            stage=stage,
            halves=halves,
            boundaries=boundaries,
            load=lambda batch: images.load(batch.ids, batch.views),
            rows=CachedRows(name, context, config, stage, digests, remote, present_cost_inputs, clock, keeps),
            objective=Objective(task=context.corpus.task, smoothing=config.optimizer.label_smoothing),
            clock=clock,
        )

    # Seconds of an evaluation are counted as a whole, by the loop.
    return pipeline("train", context.feed.images, context.clock), pipeline("test", context.evaluated, PhaseClock())


def facts_of(config: Config, context: BuildContext) -> GridFacts:
    """Return the shape of the grid.

    Raises:
        UsageError: settings do not fit each other, or the model.
    """
    settings, rows = GridConfig.of(config), config.optimizer.batch_size
    parts = settings.ranks_per_replica(context.world.size)
    if parts > 1:
        check_not_tied(context, config)
    check_parts(config, parts, blocks=len(context.chain.blocks))
    number = settings.micro_batches or default_micro_batches(parts, rows=rows, repartitions=settings.redeals)
    if number > rows:
        raise UsageError(f"--micro-batches ({number}) must be at most --batch-size ({rows})")
    # BatchNorm that keeps its statistics normalises nothing by the batch.
    if config.freeze.statistics != "kept":
        asked = f"--micro-batches ({number}) of --batch-size ({rows})"
        check_rows(context, start=config.freeze.cut or 0, rows=rows // number, asked=asked)
    if settings.redeals and parts > 1 and not shorter_lines(parts, micro_batches=number):
        factor = next(factor for factor in range(2, parts + 1) if parts % factor == 0)
        raise UsageError(
            f"--micro-batches ({number}) must be a multiple of {factor} with --redeal on and --parts {parts}, "
            "because up to that many replicas may share a batch"
        )
    return GridFacts(
        parts=parts,
        replicas=context.world.size // parts,
        micro_batches=number,
        schedule=settings.pipeline,
        cache=config.cache.cache,
        repartitions=settings.redeals,
    )


def default_micro_batches(parts: int, *, rows: int, repartitions: bool) -> int:
    """Return the default number of micro-batches for a batch of `rows` samples."""
    if parts == 1:
        return 1
    # Two samples at least: BatchNorm cannot normalise one.
    number = max(1, min(2 * parts, rows // 2))
    # As many lines as there were parts may come to share a batch.
    return max(parts, number // parts * parts) if repartitions else number


class BlockTrial(NamedTuple):
    """The layouts of tensors between blocks for images of one shape, and each block's seconds."""

    boundaries: tuple[TensorLayout, ...]
    seconds: tuple[float, ...]
    """Seconds of each block, forward and backward."""


def try_sizes(context: BuildContext, config: Config, halves: Halves, facts: GridFacts) -> dict[int, BlockTrial]:
    """Return a trial for each number of samples that passes through the pipeline at once."""
    images = example_images(context, rows=config.optimizer.batch_size)
    rows = {*sizes_of(len(images), facts.micro_batches), len(images)}
    kept = config.freeze.statistics == "kept"
    return {number: try_blocks(context.chain, halves.part, images[:number], kept=kept) for number in sorted(rows)}


def try_blocks(chain: Chain, run: RunBlocks, images: Tensor, *, kept: bool = False) -> BlockTrial:
    """Try a training step with `images`, (B, C, H, W), without changing parameters, buffers, modes or random state.

    With `kept`, BatchNorm normalises by its running statistics, as in training.

    Raises:
        UsageError: a block cannot be trained on so few images.
    """
    boundaries = {0: TensorLayout.of(images)}

    def step(x: Tensor, start: int, stop: int) -> Tensor:
        output = one_block(run, x, start, name=chain.blocks[start].name)
        boundaries[stop] = TensorLayout.of(output)
        return output

    with state_kept(chain.model):
        chain.model.train()
        for module in chain.model.modules() if kept else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        seconds = block_seconds(step, images, depth=len(chain.blocks))
    return BlockTrial(tuple(boundaries.values()), tuple(seconds))


def one_block(run: RunBlocks, x: Tensor, block: int, *, name: str) -> Tensor:
    """Return a block's output, without gradient, after a forward and a backward pass."""
    try:
        output = run(x.detach().requires_grad_(), block, block + 1)
        output.backward(torch.ones_like(output))
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"block {name} cannot be trained on micro-batches of {len(x)} samples ({error}); lower --micro-batches "
            "or raise --batch-size"
        ) from error
    return output.detach()


def open_places(world: World, facts: GridFacts, *, observing: bool) -> dict[int, Place]:
    """Return this rank's place in pipelines of every possible length, the run's first length first. Collective."""
    shorter = shorter_lines(facts.parts, micro_batches=facts.micro_batches)
    places = {}
    # Now, and not when blocks change hands: a run that is resumed begins with the partitioning that it had.
    for parts in [facts.parts, *(shorter if facts.repartitions else [])]:
        mesh = open_mesh(world, partitions=parts)
        places[parts] = Place(mesh, open_line(mesh) if parts > 1 and observing else None)
    return places


def observes(config: Config) -> bool:
    """Return True if ranks of a pipeline must combine their observations."""
    return config.freeze.freeze not in ("none", "static") or bool(config.freeze.shadow_names())


def join_of(line: World | None) -> Join:
    """Return the function that combines the observations of a pipeline's ranks, each of its own blocks."""
    if line is None:
        return list

    def join(local: Sequence[float]) -> list[float]:
        summed: list[float] = line.allreduce_sum(torch.tensor(local, dtype=torch.float64), name="grid.join").tolist()
        return summed

    return join


def introduce(
    context: BuildContext, facts: GridFacts, segments: tuple[Segment, ...], batch: Sequence[TensorLayout]
) -> None:
    """Log each rank's part, and the bytes that the ranks of a pipeline send per batch."""
    cuts = ", ".join(f"{start}..{stop - 1}" for start, stop in segments)
    # Activations one way, errors of the same shape the other, while nothing is frozen.
    sent = sum(batch[start].num_bytes for start, _ in segments[1:])
    context.say(
        f"grid: parts {facts.parts} (blocks {cuts}), replicas {facts.replicas}, micro-batches {facts.micro_batches}, "
        f"schedule {facts.schedule}; bytes per step in a pipeline: activations {sent}, gradients {sent}"
    )
