"""From a configuration to the strategy: where each rank stands, which blocks it gets, and what trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from hvfreeze.chain.segments import Boundary, Segment
from hvfreeze.config.tree import Config
from hvfreeze.data.decoding import Images
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.freezing.gradients import Join
from hvfreeze.prefix.features import Halves
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.mesh import Mesh, open_line, open_mesh
from hvfreeze.ranks.wire import open_wire
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.cutting import block_costs, example_images, open_segments
from hvfreeze.strategies.freezing import open_freezer
from hvfreeze.strategies.grid.dealing.deal import Deal, shorter_lines
from hvfreeze.strategies.grid.dealing.holding import Holding, Place
from hvfreeze.strategies.grid.dealing.moving import MOVING
from hvfreeze.strategies.grid.facts import Facts, check_segments, facts_of
from hvfreeze.strategies.grid.line.pipeline import EVALUATION, LANES, Pipeline
from hvfreeze.strategies.grid.line.trial import Trial, sizes_of, try_blocks
from hvfreeze.strategies.grid.rows.entry import AsImages, AsRows, Entry
from hvfreeze.strategies.grid.rows.errands import ERRANDS, Errands
from hvfreeze.strategies.grid.rows.keeping import Keeper, keeps_rows
from hvfreeze.strategies.grid.strategy import Grid
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
    costs = block_costs(materials, config.strategy, lambda: trials[min(trials)].seconds)
    places = open_places(world, facts, observing=observes(config))
    boundaries = {rows: trial.boundaries for rows, trial in trials.items()}
    introduce(materials, facts, segments, boundaries[config.optimizer.batch_size])
    entries, pipelines = open_lines(materials, config, facts, halves, boundaries)

    def opened() -> Grid:
        settings = config.optimizer
        holding = Holding(
            facts,
            Deal(segments),
            places,
            materials.chain,
            pipelines,
            open_freezer=partial(train, materials, config),
            settings=settings,
            costs=costs,
        )
        return Grid(
            facts,
            holding,
            pipelines,
            (materials.feed.images, materials.evaluated),
            entries,
            settings=settings,
            world=world,
            clock=materials.clock,
            say=materials.say,
        )

    return together(world, opened, name="grid.freezer")


def open_lines(
    materials: Materials,
    config: Config,
    facts: Facts,
    halves: Halves,
    boundaries: Mapping[int, Sequence[Boundary]],
) -> tuple[tuple[Entry, Entry], tuple[Pipeline, Pipeline]]:
    """Return where batches come in, and this rank's part in its line, both for training and for evaluation.

    Collective: every rank of the world must call this.
    """
    world, keeper = materials.world, Keeper(materials, config)
    kept = together(world, lambda: keeps_rows(config, facts, world), name="grid.rows")
    wire = open_wire(world, [*LANES, EVALUATION, ERRANDS, MOVING])

    def errands(mesh: Mesh, deal: Deal, reader: int) -> Errands:
        return Errands(mesh, deal.segments, reader, halves=halves, wire=wire, boundaries=boundaries)

    def opened(name: str, images: Images, clock: PhaseClock) -> tuple[Entry, Pipeline]:
        entry = AsRows(name, world, errands, partial(keeper.open, name, clock)) if kept else AsImages()
        pipeline = Pipeline(
            halves=halves,
            wire=wire,
            boundaries=boundaries,
            load=lambda batch: images.load(batch.ids, batch.views),
            entry=entry,
            objective=Objective(smoothing=config.optimizer.label_smoothing),
            clock=clock,
        )
        return entry, pipeline

    training = opened("train", materials.feed.images, materials.clock)
    # Seconds of an evaluation are counted as a whole, by the loop.
    evaluation = opened("test", materials.evaluated, PhaseClock())
    return (training[0], evaluation[0]), (training[1], evaluation[1])


def train(materials: Materials, config: Config, place: Place, segment: Segment) -> Freezer:
    """Return what trains the blocks of `segment` on a rank that stands at `place`."""
    return open_freezer(
        materials,
        materials.chain.named_parameters(*segment),
        config.optimizer,
        config.freeze,
        world=place.mesh.replica_world,
        held=segment,
        join=join_of(place.line),
    )


def open_places(world: World, facts: Facts, *, observing: bool) -> dict[int, Place]:
    """Return this rank's place in lines of every length that there may be, the run's first one first.

    Collective: every rank of the world must call this, while nothing else is on its way.
    """
    shorter = shorter_lines(facts.parts, micro_batches=facts.micro_batches)
    places = {}
    # Now, and not when ranks are dealt out anew: a run that is resumed begins with the deal that it had.
    for parts in [facts.parts, *(shorter if facts.redeals else [])]:
        mesh = open_mesh(world, partitions=parts)
        places[parts] = Place(mesh, open_line(mesh) if parts > 1 and observing else None)
    return places


def try_sizes(materials: Materials, config: Config, halves: Halves, facts: Facts) -> dict[int, Trial]:
    """Return what a step is like with each number of samples that goes through the line at once."""
    images = example_images(materials, rows=config.optimizer.batch_size)
    rows = {*sizes_of(len(images), facts.micro_batches), len(images)}
    return {number: try_blocks(materials.chain, halves.part, images[:number]) for number in sorted(rows)}


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
        f"grid: parts {facts.parts} (blocks {cuts}), replicas {facts.replicas}, micro-batches {facts.micro_batches}, "
        f"{facts.schedule}; bytes a step in a line: {', '.join(f'{lane} {number}' for lane, number in sent.items())}"
    )
