"""Build a run: check that ranks agree, open the data, build the model, and assemble the job."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.comm.agreement import check_equal, raise_on_all_ranks
from hvfreeze.comm.cycle_time import lengthen_cycle_on_full_cores
from hvfreeze.comm.replica_sync import broadcast_model
from hvfreeze.comm.resources import (
    count_in,
    crowding,
    note_bound_cores,
    threads_per_rank,
)
from hvfreeze.comm.world import World
from hvfreeze.config.data import TEXT, DataConfig
from hvfreeze.config.freeze import AUTO
from hvfreeze.config.model import is_downloaded
from hvfreeze.config.tree import Config, to_dict, to_file
from hvfreeze.data.batches import Corpus, padded_batches
from hvfreeze.data.decoding import Images
from hvfreeze.data.folders import class_folder_of, first_image
from hvfreeze.data.images import TRANSPARENT, ArraySource, FileSource
from hvfreeze.data.own import DatasetSource
from hvfreeze.effects import Plan, without_effect
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Length
from hvfreeze.freezing.frozen_prefix import trainable_of
from hvfreeze.heads.features import token_forms
from hvfreeze.heads.flips import find_out, is_open
from hvfreeze.heads.token_form import try_token_forms
from hvfreeze.inference.run_card import card_of, libraries_of
from hvfreeze.model.blocks import Chain
from hvfreeze.model.hugging_face import read_preparation
from hvfreeze.model.small_maps import note_on_small_maps
from hvfreeze.runs.clock import SET_UP_PHASES, PhaseClock
from hvfreeze.runs.directory import PER_RANK, check_directory, directory_name, open_record, unusable
from hvfreeze.runs.environment import describe_environment, facts_of_this_rank, source_digest, version_of
from hvfreeze.runs.progress import RunLogger
from hvfreeze.runs.record import NullRecord
from hvfreeze.runs.trackers import check_trackers
from hvfreeze.samples.duplicates import conflict_of, overlap_of
from hvfreeze.samples.opening import content_of, load_share, open_agreed_corpus
from hvfreeze.strategies.base import BuildContext
from hvfreeze.strategies.opening import rows_evaluated
from hvfreeze.training.blueprint import Blueprint
from hvfreeze.training.budget import Budget, Work, time_forward
from hvfreeze.training.checkpoint import has_begun
from hvfreeze.training.job import Job
from hvfreeze.training.journal import Journal
from hvfreeze.training.parts import Factory
from hvfreeze.training.recipes import first_part, named, planned
from hvfreeze.training.start_notes import (
    notes_on_flips,
    notes_on_freezing,
    notes_on_mean,
    notes_on_memory,
    shares_of_classes,
)
from hvfreeze.training.verb_settings import for_head, with_flips
from hvfreeze.user_code import HF, code_sha256, is_named_code
from hvfreeze.wording import first_few, plural


def prepare(config: Config, world: World, *, started: float | None = None) -> Job:
    """Build a run from its configuration. For `started` see `run`. Collective.

    Raises:
        HvfreezeError: the configuration, the data, the weights or the run directory is invalid; on all ranks.
    """
    asked, set_up = config, PhaseClock(SET_UP_PHASES)
    started, config = time.monotonic() if started is None else started, config.resolved()
    set_up.seconds["start"] = time.monotonic() - started
    check_equal(world, "configuration", to_dict(config), apart=PER_RANK)
    # Log this first, because loading may take a minute.
    data, model = config.data.data_dir or config.data.data, config.model.model
    RunLogger(rank=world.rank, quiet=config.run.quiet).info(f"loading {data} and {model}")
    config, prepared = with_processor_settings(config, world)
    # Collective, so it is always called, even if its result is unused: environments may differ between hosts.
    share = threads_per_rank(world)
    torch.set_num_threads(config.run.threads or count_in("OMP_NUM_THREADS") or share)
    rests = []
    if config.strategy.strategy == "replicas":
        rests = lengthen_cycle_on_full_cores(world, torch.get_num_threads())
    environment = environment_of(config, world)
    directory = open_run_directory(config, world, environment)
    trackers = config.run.trackers()
    raise_on_all_ranks(world, lambda: check_trackers(trackers) if world.rank == 0 else None, name="trackers")
    holds_out = config.freeze.auto or config.head.solved
    corpus, identities = open_agreed_corpus(config, world, holds_out=holds_out, clock=set_up)
    settings, file, requested = to_dict(config), to_file(config), config
    config = replace(config, optimizer=replace(config.optimizer, batch_size=corpus.plan.batch_size))
    blueprint = Blueprint.of(config.model, corpus, image_size=config.data.image_size, head=config.head.head)
    with set_up.within("model"):
        chain, notes = build_equal_model(config, world, blueprint)
    if world.rank == 0:
        notes += note_on_small_maps(config.model.model, chain.model, blueprint.image_shape)
    config, kept = with_pretrained_statistics(config, corpus, chain)
    job = assemble(config, world, directory, blueprint, chain, corpus, started=started, set_up=set_up)
    job.data_identities |= identities
    job.requested = requested
    # Last, so that a run that fails to start leaves its directory unchanged.
    job.record = raise_on_all_ranks(
        world,
        lambda: (
            open_record(directory, settings, environment=environment, file=file) if world.rank == 0 else NullRecord()
        ),
        name="record",
    )
    job.logger.log_to(job.record.log)
    plan = plan_of(job, corpus, chain, asked=asked)
    job.majority_share, unequal = shares_of_classes(config, corpus)
    job.notes = [
        *prepared,
        *corpus.notes,
        *unequal,
        *(note for note in job.notes if note not in corpus.notes),
        *([job.overlap.describe()] if job.overlap else []),
        *([job.conflict.describe()] if job.conflict else []),
        *notes,
        *kept,
        *notes_on_freezing(config, plan),
        *(notes_on_memory(job, blueprint) if plan.trained else []),
        *(
            note + (job.beside_majority if job.flip_trial else "")
            for note in notes_on_flips(job.settings, corpus.train, job.flip_trial)
        ),
        *without_effect(plan),
        *crowding(world),
        *note_bound_cores(world),
        *rests,
        *job.record.notes,
    ]
    job.set_up_seconds = set_up.read()
    return job


def assemble(
    config: Config,
    world: World,
    directory: Path,
    blueprint: Blueprint,
    chain: Chain,
    corpus: Corpus,
    *,
    started: float = 0.0,
    set_up: PhaseClock | None = None,
) -> Job:
    """Assemble the job and load this rank's pixels; `set_up` measures that. For `started` see `run`. Collective."""
    set_up = set_up or PhaseClock(SET_UP_PHASES)
    replica, place = divmod(world.rank, world.size // corpus.plan.replicas)
    rows = rows_evaluated(config, blueprint.image_shape)
    set_up.enter("decoding")
    feed, evaluated, normalisation, notes = load_share(
        config, world, corpus, replica=replica, rows=rows, model=chain.model
    )
    details = list[str]()
    set_up.enter("other")
    if normalisation is not None and isinstance(feed.images, Images):
        (notes if normalisation.advice else details).insert(0, normalisation.describe())
    if config.head.solved and config.head.head == "multi-level" and config.head.tokens == AUTO:
        task = corpus.task
        forms = try_token_forms(chain, feed, blueprint.image_shape, task=task, place=place, world=world)
        if forms is not None:
            config = replace(config, head=replace(config.head, tokens=forms.best))
            notes = [*notes, forms.line()]
    set_up.enter("duplicates")
    content = content_of(world, corpus, feed, evaluated)
    overlap, conflict = overlap_of(world, corpus, feed, evaluated), None
    if config.strategy.tasks is None and corpus.train.kind == "classes":
        conflict = conflict_of(world, corpus, feed)
    set_up.enter("other")
    card = raise_on_all_ranks(
        world, lambda: card_of(config, corpus, feed.images.transform, rows=rows, hashed=world.rank == 0), name="card"
    )
    clock, logger = PhaseClock(), RunLogger(rank=world.rank, quiet=config.run.quiet)
    context = BuildContext(
        world=world,
        replica=replica,
        chain=chain,
        build=lambda num_classes: blueprint.build(num_classes)[0],
        corpus=corpus,
        feed=feed,
        evaluated=evaluated,
        directory=directory,
        clock=clock,
        say=logger.info,
        length=Length(config.optimizer.epochs),
        fused=config.optimizer.optimizer == AUTO,
    )
    factory = Factory(context, blueprint, trainable_of(chain.model), asked_flips=config.data.flips)
    evaluation_batches = padded_batches(corpus.share(replica), evaluated.labels_of, rows)
    finding = None
    if is_open(config, flips=corpus.train.flips):
        trained = config.model.weights != "none"
        with set_up.within("flips"):
            finding = find_out(
                chain, feed, blueprint.image_shape, task=corpus.task, trained=trained, place=place, world=world
            )
    flips = None if finding is None else finding.flips
    settings, tested = with_flips(config, flips), sum(batch.counted for batch in evaluation_batches)
    continues = settings.run.resume and world.broadcast_object(has_begun(directory), name="run.begun")
    budget = open_budget(factory, settings, evaluated=tested, started=started, continues=continues)
    opened = factory.open(first_part(settings))
    shown = chain if config.freeze.auto else opened.chain
    return Job(
        data_identities=content,
        overlap=overlap,
        conflict=conflict,
        config=config,
        world=world,
        directory=directory,
        block_names=tuple(block.name for block in shown.blocks),
        factory=factory,
        opened=opened,
        journal=Journal(named(config)),
        budget=budget,
        card=card,
        evaluation_batches=evaluation_batches,
        clock=clock,
        logger=logger,
        flips=flips,
        flip_trial=finding,
        notes=[*notes, *notes_on_mean(factory, settings)],
        details=details,
    )


def with_processor_settings(config: Config, world: World) -> tuple[Config, list[str]]:
    """Return the settings with the size, crop and filter of a Hugging Face model's image processor, and a note.

    Given settings are kept. Collective.
    """
    name = config.model.model
    if not name.startswith(HF) or config.data.data == TEXT:
        return config, []
    # Rank 0's: another node may have to download it first.
    read = raise_on_all_ranks(world, lambda: read_preparation(name) if world.rank == 0 else {}, name="processor")
    found = world.broadcast_object(read, name="processor.of_rank_0")
    if config.given & {"image_size", "resize"}:
        found = {key: value for key, value in found.items() if key not in ("image_size", "resize")}
    found = {key: value for key, value in found.items() if key not in config.given}
    if not found:
        return config, []
    if config.data.image_size is None and "image_size" not in found:
        found.pop("fit", None)
    shown = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in found.items())
    note = f"images are preprocessed like {name}'s image processor does: {shown}"
    return replace(config, data=replace(config.data, **found)), [note]


def environment_of(config: Config, world: World) -> dict[str, Any]:
    """Return the record of machines and code, after checking that all ranks run the same. Collective."""
    versions = {name: version_of(name) for name in (*libraries_of(config), "horovod", "hvfreeze")}
    check_equal(world, "versions", {**versions, "source": source_digest()})
    named = {"model": config.model.model, "data": config.data.data}
    code = raise_on_all_ranks(
        world,
        lambda: {flag: code_sha256(flag, text) for flag, text in named.items() if is_named_code(text)},
        name="code",
    )
    check_equal(world, "code", code)
    environment = describe_environment(world.allgather_object(facts_of_this_rank(), name="environment"))
    return environment | ({"code": code} if code else {})


def open_run_directory(config: Config, world: World, environment: dict[str, Any]) -> Path:
    """Return the run directory, the same on every rank: the user's, or a new one in `runs`. Collective.

    Raises:
        HvfreezeError: the directory holds another run or is not writable; on all ranks.
    """
    named = directory_name(config.model.model, config.data.data, config.freeze.freeze)
    given = config.run.run_dir or str(Path("runs") / named)
    directory = Path(world.broadcast_object(given, name="run.directory")).resolve()

    def check() -> None:
        if world.rank == 0:
            check_directory(directory, to_dict(config), environment)
            check_apart_from_data(directory, config.data)

    raise_on_all_ranks(world, check, name="directory")
    return directory


def check_apart_from_data(directory: Path, data: DataConfig) -> None:
    """Raise UsageError if a new run's directory holds images, other runs, or would be a class of the data.

    `directory` is absolute.
    """
    if (directory / "config.yaml").exists():
        return
    found = first_image(directory)
    if found is not None:
        raise unusable(directory, f"holds images ({found.relative_to(directory)}), and no run")
    runs = sorted(path.parent.name for path in directory.glob("*/config.yaml"))
    if runs:
        raise UsageError(f"--run-dir ({directory}) holds other runs ({first_few(runs)}); name a new folder in it")
    root = data.data_dir if data.data == "imagefolder" else None
    above = None if root is None else class_folder_of(directory, Path(root))
    if above is not None:
        raise unusable(directory, f"is in {above}, whose folders are the classes of the data")


def build_equal_model(config: Config, world: World, blueprint: Blueprint) -> tuple[Chain, list[str]]:
    """Build the model, the same on every rank, and return it with notes; seeds torch's generator. Collective."""
    if is_downloaded(config.model.weights):
        # One rank per node downloads; the others find the file.
        raise_on_all_ranks(world, lambda: blueprint.build_from(0) if world.local_rank == 0 else None, name="weights")
    chain, notes = raise_on_all_ranks(world, lambda: blueprint.build_from(config.run.seed), name="model")
    broadcast_model(chain.model, world)
    # Random draws such as dropout differ between ranks. Rank 0 keeps the generator's state after building, so that a
    # run of one rank equals plain PyTorch.
    if world.rank > 0:
        torch.manual_seed(config.run.seed + world.rank)
    return chain, notes


FEW_BATCHES = 20
"""Number of batches below which BatchNorm's running statistics (momentum 0.1) keep an eighth of the pretrained ones."""


def with_pretrained_statistics(config: Config, corpus: Corpus, chain: Chain) -> tuple[Config, list[str]]:
    """Return the settings, with the pretrained BatchNorm statistics and a note if training has too few batches.

    Running statistics, which evaluation uses, follow the statistics of training batches slowly.
    """
    batches = config.optimizer.epochs * corpus.plan.batches_per_epoch
    is_open = (
        config.freeze.statistics == AUTO and config.model.weights != "none" and config.run.budget_seconds() is None
    )
    is_plain = not config.freeze.auto and not config.head.solved and not config.strategy.batch_statistics
    has_norms = any(isinstance(module, _BatchNorm) for module in chain.model.modules())
    if not (is_open and is_plain and has_norms and batches < FEW_BATCHES):
        return config, []
    few = f"training has only {plural(batches, 'batch', 'batches')}, too few to replace them"
    note = f"BatchNorm keeps the pretrained statistics: {few}; use --statistics batch to train them"
    return replace(config, freeze=replace(config.freeze, statistics="kept")), [note]


def open_budget(factory: Factory, settings: Config, *, evaluated: int, started: float, continues: bool) -> Budget:
    """Return the budget of the run, which may continue an earlier job. Collective.

    Raises:
        UsageError: there are too few samples to fit a head, or the time budget is too short.
    """
    world, seconds = factory.context.world, settings.run.budget_seconds()

    def table() -> Work:
        if settings.head.solved:
            factory.check_held_out(settings.head.head_fit)
        solved = for_head(factory.with_affordable_flips(settings)) if settings.freeze.auto else settings
        return factory.work(solved, cut=settings.freeze.cut or 0 if settings.freeze.auto else 0, evaluated=evaluated)

    work = raise_on_all_ranks(world, table, name="work")
    budget = Budget(work=work, world=world, seconds=seconds, started=started)
    if seconds is not None:
        context, precision = factory.context, settings.optimizer.precision
        budget.rate = time_forward(context.chain, context.feed, precision=precision, world=world, seconds=seconds)
    budget.begin()
    if seconds is not None and not continues:
        step = work.step(settings.optimizer.batch_size * settings.optimizer.accumulate)
        least = (work.head_fit, "fitting the head") if settings.head.solved else (step, "a step")
        budget.check(least[0], what=least[1])
    return budget


def plan_of(job: Job, corpus: Corpus, chain: Chain, *, asked: Config) -> Plan:
    """Return the plan of a run, which determines the settings that have an effect; `asked` are the user's."""
    trained = chain.modules(min(job.config.freeze.cut or 0, len(chain.blocks) - 1), len(chain.blocks))
    sources = [image_set.source for image_set in (corpus.train, corpus.evaluated)]
    files = [source for source in sources if isinstance(source, FileSource)]
    others = [source for source in sources if isinstance(source, DatasetSource)]
    return Plan(
        config=job.config,
        asked=asked,
        parts=planned(job),
        ranks=job.world.size,
        replicas=corpus.plan.replicas,
        flips=corpus.train.flips,
        side=min(corpus.train.image_shape[1:], default=0),
        decodes=not isinstance(corpus.train.source, ArraySource),
        oblong=any(source.oblong for source in files) or any(source.oblong for source in others),
        # Only some images of a custom dataset were probed.
        transparent=bool(others) or any(source.known_odd[TRANSPARENT] for source in files),
        normalises=any(isinstance(module, _BatchNorm) for module in trained),
        obstacle=job.factory.obstacle() if job.config.freeze.auto else "",
        gives_tokens="tokens" in asked.given and bool(token_forms(chain, example=job.factory.blueprint.example())),
    )
