"""Builds a grid from a configuration: each rank's place, its blocks, and what trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

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
from hvfreeze.model.modes import in_evaluation, state_kept
from hvfreeze.model.segments import Segment, block_seconds
from hvfreeze.optim import Objective
from hvfreeze.prefix.cache_decision import CostInputs
from hvfreeze.prefix.features import Halves
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.base import BuildContext
from hvfreeze.strategies.build_parts import (
    check_not_tied,
    check_parameters,
    check_parts,
    check_rows,
    cut_blocks,
    example_images,
    measured_costs,
    open_cost_inputs,
    open_freezer,
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
from hvfreeze.strategies.model_parallel import dry_run


def open_grid(context: BuildContext, config: Config) -> Grid:
    """Return the grid of a run. Collective.

    Raises:
        UsageError: settings do not fit each other, the model or the world; on all ranks.
    """
    world, chain, settings = context.world, context.chain, config.optimizer
    facts = raise_on_all_ranks(world, lambda: facts_of(config, context), name="grid.settings")
    halves = Halves(chain, settings.precision)
    rows = sizes_of(settings.batch_size, facts.micro_batches)
    costs = measured_costs(context, GridConfig.of(config), lambda: block_times(context, config, halves, rows=rows[-1]))
    segments = raise_on_all_ranks(
        world, lambda: cut_blocks(GridConfig.of(config), costs, parts=facts.parts), name="grid.segments"
    )
    raise_on_all_ranks(world, lambda: check_parameters(chain, segments, frozen=True), name="grid.parameters")
    places = open_places(world, facts, observing=observes(config))
    with in_evaluation(chain.model):
        boundaries = {
            number: dry_run(halves.prefix, example_images(context, rows=number), depth=len(chain.blocks))
            for number in {*rows, settings.batch_size}
        }
    introduce(context, facts, segments, boundaries[settings.batch_size])
    keeps = raise_on_all_ranks(world, lambda: keeps_rows(config, facts, world), name="grid.rows")
    ways: dict[str, str] = {}
    if GridConfig.of(config).cut_by not in ("params", "count"):
        ways["the cuts"] = "--cut-by params or count"
    if keeps and facts.cache == "auto":
        ways["the cache"] = "--cache on or off"
    if facts.repartitions and ways:
        context.say(
            f"grid: with --redeal on, measured times determine {' and '.join(ways)}, and the last digits of results "
            f"depend on them: a repeated or resumed run may differ; use {' and '.join(ways.values())} for "
            "repeatable runs"
        )
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
        # Both splits share one budget.
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
    # BatchNorm that keeps its statistics does not normalise by the batch, so any batch size is valid.
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
    # At least two samples: BatchNorm cannot normalise one.
    number = max(1, min(2 * parts, rows // 2))
    # Later, up to `parts` pipelines may share a batch.
    return max(parts, number // parts * parts) if repartitions else number


def block_times(context: BuildContext, config: Config, halves: Halves, *, rows: int) -> list[float]:
    """Return the seconds of each block in a training step, forward and backward, on `rows` samples.

    Parameters, buffers, modes and random state do not change.
    """
    model = context.chain.model

    def step(x: Tensor, start: int, stop: int) -> Tensor:
        output = halves.part(x.detach().requires_grad_(), start, stop)
        output.backward(torch.ones_like(output))
        return output.detach()

    with state_kept(model):
        model.train()
        for module in model.modules() if config.freeze.statistics == "kept" else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        return block_seconds(step, example_images(context, rows=rows), depth=len(context.chain.blocks))


def open_places(world: World, facts: GridFacts, *, observing: bool) -> dict[int, Place]:
    """Return this rank's place in pipelines of every possible length, the run's first length first. Collective."""
    shorter = shorter_lines(facts.parts, micro_batches=facts.micro_batches)
    places = {}
    # Opened at the start, not when blocks move: a resumed run begins with the partitioning of its checkpoint.
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
    # Activations forward and gradients of the same shape back, while nothing is frozen.
    sent = sum(batch[start].num_bytes for start, _ in segments[1:])
    context.say(
        f"grid: parts {facts.parts} (blocks {cuts}), replicas {facts.replicas}, micro-batches {facts.micro_batches}, "
        f"schedule {facts.schedule}; bytes per step in a pipeline: activations {sent}, gradients {sent}"
    )
