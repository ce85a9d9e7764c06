"""A run made ready: everything that the training loop uses, built the same way on every rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hvfreeze.applying.card import Card, describe, head_named
from hvfreeze.chain.blocks import Chain
from hvfreeze.config.tree import Config, to_dict
from hvfreeze.data.batches import Batch, Corpus, TrainFeed, grouped, open_feeds, padded_batches
from hvfreeze.heads.fit import HeadFit
from hvfreeze.named_code import code_sha256, is_named_code
from hvfreeze.ranks.agreement import check_equal, together
from hvfreeze.ranks.equal_models import broadcast_model
from hvfreeze.ranks.machine.share import crowding, memory_budget, threads_of_environment, threads_per_rank
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.runs.directory import PER_RANK, check_directory, directory_name, open_record
from hvfreeze.runs.environment import describe_environment, facts_of_this_rank, source_digest, version_of
from hvfreeze.runs.record import NullRecord, Record
from hvfreeze.strategies.strategy import Materials, Strategy
from hvfreeze.training.checkpoints.file import Saving
from hvfreeze.training.choice import place_of, reads_images
from hvfreeze.training.evaluation import Best, Scores, Totals
from hvfreeze.training.making.blueprint import Blueprint, statistics_of
from hvfreeze.training.making.notes import notes_on_freezing
from hvfreeze.training.making.samples import load_feeds, open_corpus
from hvfreeze.training.progress import Curves, NoCurves, Speaker, check_curves
from hvfreeze.training.stages.budget import Budget
from hvfreeze.training.stages.course import Course
from hvfreeze.training.stages.guard import Guard
from hvfreeze.training.stages.opening import Opener
from hvfreeze.training.stages.stage import Stage


@dataclass
class Job:
    """The parts of a run, and how far it is."""

    config: Config
    world: World
    directory: Path
    block_names: tuple[str, ...]
    course: Course
    """The stages of the run, and what is open for the one under way."""
    budget: Budget
    """Chooses how many steps the stages have, where --time-budget is given."""
    guard: Guard | None
    """Of solutions that are followed by others; None where there is none, or it was switched off."""
    card: Card
    """Of the models, as far as it is known before they are trained."""
    evaluation_batches: list[Batch]
    """This replica's share of the evaluation samples."""
    replicas: int
    clock: PhaseClock
    speaker: Speaker
    notes: list[str]
    record: Record | NullRecord = field(default_factory=NullRecord)
    curves: NoCurves | Curves = field(default_factory=NoCurves)
    data_identities: dict[str, str] = field(default_factory=dict)
    step: int = 0
    epochs_done: int = 0
    epoch_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase at the end of the last epoch that was recorded."""
    best_accuracy: float = 0.0
    last_accuracy: float = 0.0
    last_scores: Scores = field(default_factory=dict)
    """What the last evaluation found, by model."""
    best: dict[str, Best] = field(default_factory=dict)
    evaluations_in_vain: int = 0
    """Since a model was last better than ever."""
    totals: dict[str, Totals] = field(default_factory=dict)
    """Sums over the epoch's training samples so far, by model."""
    asked_to_leave: bool = False
    checkpoint_seconds: float = 0.0
    """What training waited for the last checkpoint."""
    saving: Saving | None = None
    """On rank 0, the checkpoint that is being written."""
    solved: HeadFit | None = None
    """What the epoch under way has solved, if it is a solution."""

    @property
    def strategy(self) -> Strategy:
        """What is open for the stage under way."""
        return self.course.opened.strategy

    @property
    def feed(self) -> TrainFeed:
        """The training samples of the stage under way."""
        return self.course.opened.feed

    @property
    def stage(self) -> Stage:
        """The stage under way."""
        return self.course.stage

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch of the stage under way."""
        return self.stage.steps_per_epoch

    @property
    def stage_step(self) -> int:
        """Steps of the stage under way that are made."""
        return self.step - self.course.first_step

    @property
    def stage_epoch(self) -> int:
        """Epochs of the stage under way that are made."""
        return self.epochs_done - self.course.first_epoch

    def images(self, step: int) -> int:
        """Return how many images all replicas together train on in the first `step` steps, of this stage or before."""
        return self.course.batches(step) * self.config.optimizer.batch_size * self.replicas

    def steps_of(self, epoch: int) -> list[list[Batch]]:
        """Return the batches of each step of an epoch of the stage under way."""
        return grouped(self.feed.epoch(epoch), self.config.optimizer.accumulate)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.course.total_steps

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last step ended an epoch of the stage under way."""
        return self.stage_step % self.steps_per_epoch == 0 or self.stage_step == self.stage.steps

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.course.is_last and self.stage_epoch == self.stage.epochs

    def stages_told(self) -> list[dict[str, Any]]:
        """Return what came of each stage, for summary.json."""
        verdicts = {v.stage: v for v in self.guard.verdicts} if self.guard else {}
        told = []
        for number, stage in enumerate(self.course.stages):
            judged = verdicts.get(number)
            found = {"held_out_accuracy": judged.held_out_accuracy, "kept": judged.kept} if judged else {}
            told.append({"stage": stage.name, "steps": stage.steps, **found})
        return told


def prepare(config: Config, world: World, *, started: float | None = None) -> Job:
    """Build a run from its configuration. For `started` see `run`; None is now.

    Collective: every rank of `world` must call this.

    Raises:
        HvfreezeError: the configuration, the data, the weights or the run directory cannot be used, on all ranks.
    """
    started, config = time.monotonic() if started is None else started, config.resolved()
    check_equal(world, "configuration", to_dict(config), apart=PER_RANK)
    # Collective, hence called also where its result is not needed: environments may differ between hosts.
    share = threads_per_rank(world)
    torch.set_num_threads(config.run.threads or threads_of_environment() or share)
    check_equal(world, "versions", versions())
    code = together(world, lambda: own_code(config), name="code")
    check_equal(world, "code", code)
    environment = describe_environment(world.allgather_object(facts_of_this_rank(), name="environment"))
    environment |= {"code": code} if code else {}
    named = directory_name(config.model.model, config.data.data, config.freeze.freeze)
    directory, settings = choose_directory(config.run.run_dir, named, world), to_dict(config)
    together(
        world,
        lambda: check_directory(directory, settings, environment) if world.rank == 0 else None,
        name="directory",
    )
    together(world, lambda: check_curves(wanted=config.run.tensorboard), name="curves")
    _, replicas = together(world, lambda: place_of(world, config.strategy), name="replicas")
    corpus = open_corpus(
        config.data,
        world,
        seed=config.data_seed,
        batch_size=config.optimizer.batch_size,
        replicas=replicas,
        whole_batches=not config.head.exact,
    )
    identities = together(world, corpus.identities, name="identities")
    check_equal(world, "data", identities)
    check_equal(world, "pixels", together(world, corpus.sampled_pixels, name="sampled"))
    blueprint = Blueprint.of(config.model, corpus, image_size=config.data.image_size)
    if config.model.weights == "DEFAULT":
        # One rank per node downloads; the others find the file.
        together(world, lambda: blueprint.build_from(0) if world.local_rank == 0 else None, name="weights")
    chain, notes = together(world, lambda: blueprint.build_from(config.run.seed), name="model")
    broadcast_model(chain.model, world)
    # Dropout and the like differ between ranks; rank 0 goes on from where building has left the generator, so that a
    # run of one rank is plain PyTorch's.
    if world.rank > 0:
        torch.manual_seed(config.run.seed + world.rank)
    job = assemble(config, world, directory, blueprint, chain, corpus, started=started)
    job.data_identities = identities
    # Last, so that a run that could not start leaves its directory as it was.
    job.record = together(
        world,
        lambda: open_record(directory, settings, environment=environment) if world.rank == 0 else NullRecord(),
        name="record",
    )
    job.speaker.log_to(job.record.log)
    job.notes = [
        *corpus.notes,
        *notes,
        *notes_on_freezing(config, job.course.stages),
        *crowding(world),
        *job.record.notes,
    ]
    return job


def versions() -> dict[str, str | None]:
    """Return what every rank must run: the libraries' versions, and a digest of this package's own source."""
    found = {name: version_of(name) for name in ("torch", "horovod", "hvfreeze")}
    return {**found, "source": source_digest()}


def own_code(config: Config) -> dict[str, str]:
    """Return a digest of each file of the user's own that takes part, by flag."""
    named = {"model": config.model.model, "data": config.data.data}
    return {flag: code_sha256(flag, text) for flag, text in named.items() if is_named_code(text)}


def choose_directory(given: str | None, named: str, world: World) -> Path:
    """Return the run directory, the same on every rank: the user's, or what rank 0 names it in `runs`.

    Collective: every rank of `world` must call this.
    """
    return Path(world.broadcast_object(given or str(Path("runs") / named), name="run.directory")).resolve()


def assemble(
    config: Config,
    world: World,
    directory: Path,
    blueprint: Blueprint,
    chain: Chain,
    corpus: Corpus,
    *,
    started: float = 0.0,
) -> Job:
    """Put the parts together; loads this rank's pixels. For `started` see `run`.

    Collective: every rank of `world` must call this.
    """
    replica, replicas = place_of(world, config.strategy)
    feed, evaluated = load_feeds(
        world,
        lambda: open_feeds(
            corpus,
            config.data,
            seed=config.data_seed,
            replica=replica,
            replicas=replicas,
            budget_bytes=memory_budget(world.local_size) if reads_images(world, config.strategy) else 0,
            statistics=statistics_of(config.model),
            mirrored=config.head.exact,
        ),
    )
    card = together(
        world,
        lambda: describe(
            config.model,
            config.head,
            config.data,
            corpus,
            feed.images.transform,
            precision=config.optimizer.precision,
            batch_size=config.optimizer.batch_size,
            hashed=world.rank == 0,
        ),
        name="card",
    )
    clock, speaker = PhaseClock(), Speaker(rank=world.rank, quiet=config.run.quiet)
    materials = Materials(
        world=world,
        replica=replica,
        replicas=replicas,
        chain=chain,
        build=lambda num_classes: blueprint.build(num_classes)[0],
        corpus=corpus,
        feed=feed,
        evaluated=evaluated,
        directory=directory,
        clock=clock,
        say=speaker.say,
    )
    opener = Opener(materials, config, blueprint)
    share = corpus.share(replica=replica, replicas=replicas)
    evaluation_batches = padded_batches(share, corpus.evaluated.labels, config.optimizer.batch_size)
    stages = together(world, opener.stages, name="stages")
    budget = opener.budget(stages, evaluated=len(evaluation_batches), started=started)
    course = Course(budget.plan(stages), opener)
    # The model that is kept has the last stage's head.
    card = replace(card, head=head_named(course.stages[-1].config.head))
    return Job(
        config=config,
        world=world,
        directory=directory,
        block_names=tuple(block.name for block in chain.blocks) if config.freeze.auto else course.opened.block_names,
        course=course,
        budget=budget,
        guard=Guard() if config.freeze.auto and config.freeze.has("guard") else None,
        card=card,
        evaluation_batches=evaluation_batches,
        replicas=replicas,
        clock=clock,
        speaker=speaker,
        notes=[],
    )
