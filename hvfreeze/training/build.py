"""Build a run: check that ranks agree, open the data, build the model, and assemble the job."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.comm.agreement import check_equal, raise_on_all_ranks, read_once_per_node
from hvfreeze.comm.cycle_time import lengthen_cycle_on_full_cores
from hvfreeze.comm.node_memory import protect
from hvfreeze.comm.replica_sync import broadcast_model
from hvfreeze.comm.resources import (
    count_in,
    crowding,
    memory_budget,
    note_bound_cores,
    threads_per_rank,
)
from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config, to_dict, to_file
from hvfreeze.data.batches import Corpus, TrainFeed, deal, open_feeds, padded_batches
from hvfreeze.data.class_shares import majority_of
from hvfreeze.data.data_sets import DataSplits, ImageSet, list_data, open_data, prepare_data, root_of
from hvfreeze.data.decoding import Images, Inputs, MemoryPixels, find_broken
from hvfreeze.data.folders import Folders, class_folder_of, first_image, meant_by
from hvfreeze.data.images import TRANSPARENT, ArraySource, BrokenImagesError, FileSource, count_odd
from hvfreeze.data.own import DatasetSource
from hvfreeze.data.reading import reading_of
from hvfreeze.data.settings import TEXT, DataConfig
from hvfreeze.data.tables import columns_of
from hvfreeze.effects import Plan, without_effect
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Length
from hvfreeze.freezing.frozen_prefix import trainable_of
from hvfreeze.freezing.settings import AUTO
from hvfreeze.heads.features import token_forms
from hvfreeze.heads.flips import WAY_OUT, Finding, find_out, is_open
from hvfreeze.heads.kernel import ALL_COMPARED
from hvfreeze.heads.token_form import try_token_forms
from hvfreeze.inference.normalisation import Normalisation, normalisation_of
from hvfreeze.inference.run_card import card_of, libraries_of
from hvfreeze.model.activation_memory import note_on_memory
from hvfreeze.model.blocks import Chain
from hvfreeze.model.hugging_face import read_preparation
from hvfreeze.model.settings import is_downloaded
from hvfreeze.model.small_maps import note_on_small_maps
from hvfreeze.model.weight_names import has_published
from hvfreeze.row_weights import class_weights, scaled_weights
from hvfreeze.rules import rule
from hvfreeze.runs.clock import SET_UP_PHASES, PhaseClock
from hvfreeze.runs.directory import PER_RANK, check_directory, directory_name, open_record, unusable
from hvfreeze.runs.environment import describe_environment, facts_of_this_rank, source_digest, version_of
from hvfreeze.runs.progress import RunLogger
from hvfreeze.runs.record import NullRecord
from hvfreeze.runs.trackers import check_trackers
from hvfreeze.strategies.base import BuildContext
from hvfreeze.strategies.opening import reads_images, replicas_of, rows_evaluated
from hvfreeze.tasks import Classes, Numbers, Task
from hvfreeze.training.budget import Budget, Work, time_forward
from hvfreeze.training.duplicates import conflict_of, overlap_of
from hvfreeze.training.job import Job
from hvfreeze.training.journal import Journal
from hvfreeze.training.node_pixels import notes_on_sharing, read_archive_once, share_pools
from hvfreeze.training.recipes import first_part, named, planned
from hvfreeze.training.settings import METRICS, parse_class_weights
from hvfreeze.training.stage_build import Blueprint, Factory
from hvfreeze.training.verb_settings import for_head, with_flips
from hvfreeze.user_code import HF, code_sha256, is_named_code
from hvfreeze.wording import did_you_mean, first_few, plural

FEW_BATCHES = 20
"""Number of batches below which BatchNorm's running statistics (momentum 0.1) keep an eighth of the pretrained ones."""


def notes_on_freezing(config: Config, plan: Plan) -> list[str]:
    """Return notes on what is not trained, and on random weights."""
    settings, trains = config.freeze, bool(plan.trained)
    # Given --epochs have a note of their own.
    is_silent = settings.auto and not trains and "epochs" not in plan.asked.given
    notes = [f"no fine-tuning: {plan.solves_alone}"] if is_silent else []
    if config.model.weights != "none":
        return notes
    if settings.auto:
        does = "training from scratch" if trains else "fitting a head to a network with random weights"
        way = "DEFAULT" if has_published(config.model.model) else "FILE"
        return [*notes, f"no --weights: {does}; --weights {way} starts from pretrained weights"]
    if settings.cut and not settings.auto:
        keep = "block keeps its" if settings.cut == 1 else f"{settings.cut} blocks keep their"
        return [f"the first {keep} random initialisation; freezing is for trained --weights"]
    return []


def notes_on_memory(job: Job, blueprint: Blueprint) -> list[str]:
    """Return, on rank 0, a note if a batch of images needs more memory than its machine has."""
    settings, world = job.config, job.world
    if world.rank > 0 or settings.strategy.strategy != "replicas" or len(blueprint.image_shape) != 3:
        return []
    model, batch = job.factory.context.chain.model, settings.optimizer.batch_size
    return note_on_memory(model, blueprint.image_shape, batch_size=batch, ranks=world.local_size)


def notes_on_flips(settings: Config, image_set: ImageSet, finding: Finding | None) -> list[str]:
    """Return a note on horizontal flips; `finding` is the result of the trial with and without them."""
    if finding is not None:
        return [finding.line()]
    if not settings.data.mirrors(image_set.flips):
        return []
    if settings.data.flips == "mean":
        return [f"horizontal flips: the head averages the features of each image and its flip; {WAY_OUT}"]
    shows = settings.head.solved or settings.data.augment != "none"
    return [f"horizontal flips: on; {WAY_OUT}"] if shows else []


def notes_on_mean(factory: Factory, settings: Config) -> list[str]:
    """Return a note on a head that averages over flips in predictions."""
    if not settings.head.solved or factory.with_affordable_flips(settings) == settings:
        return []
    found = f"more than {ALL_COMPARED:,} rows with flips: the head averages the features of each image and its flip"
    return [f"{found}, so predictions take 2x longer; use --flips off to disable"]


def open_corpus(
    data: DataConfig,
    world: World,
    *,
    seed: int,
    batch_size: int,
    replicas: int,
    whole_batches: bool,
    holds_out: bool = False,
    clock: PhaseClock | None = None,
) -> Corpus:
    """Open the data and plan its shards without decoding; see `deal`. `clock` measures the set-up. Collective."""
    clock = clock or PhaseClock(SET_UP_PHASES)
    clock.enter("listing")
    raise_on_all_ranks(
        world, lambda: prepare_data(data.data, data.data_dir) if world.local_rank == 0 else None, name="download"
    )
    root = root_of(data.data, data.data_dir).resolve()

    def look() -> tuple[Folders | None, str, dict[str, str]]:
        found = list_data(data.data, data.data_dir, columns_of(data))
        return (found.to_send(), found.digest(), found.local) if found else (None, "", {})

    folders, local = read_once_per_node(world, look, place=str(root))
    listed = folders and folders.here(root, local)
    contents, refusal = read_archive_once(data, world)
    splits = raise_on_all_ranks(
        world,
        lambda: open_data(
            data.data,
            data.data_dir,
            image_size=data.stored_size,
            listed=listed,
            contents=contents,
            reading=reading_of(data),
            skip_bad=data.skip_bad,
            context=data.context,
            task=data.task,
            columns=columns_of(data),
        ),
        name="data",
    )
    clock.enter("headers")
    splits = count_special_files(replace(splits, notes=[*splits.notes, *notes_on_sharing(refusal)]), world)
    clock.enter("decoding")
    if data.skip_bad:
        splits = without_broken(splits, world)
    clock.enter("other")
    return raise_on_all_ranks(
        world,
        lambda: deal(
            splits,
            data,
            seed=seed,
            batch_size=batch_size,
            replicas=replicas,
            whole_batches=whole_batches,
            holds_out=holds_out,
        ),
        name="shards",
    )


def count_special_files(splits: DataSplits, world: World) -> DataSplits:
    """Count files with special conversions, and return the splits with notes on them. Collective."""
    counted, notes = {}, list[str]()
    for part, image_set in (("train", splits.train), ("test", splits.test)):
        source = image_set.source
        if isinstance(source, FileSource):
            mine = count_odd(source, share=world.rank, shares=world.size, workers=torch.get_num_threads())
            everyone = world.allgather_object(mine, name=f"odd.{part}")
            odd = {what: sum(theirs[what] for theirs in everyone) for what in mine}
            notes += [f"{count} of {len(image_set)} {part} {what}" for what, count in odd.items() if count]
            image_set = replace(image_set, source=replace(source, odd=odd))
        counted[part] = image_set
    return replace(splits, train=counted["train"], test=counted["test"], notes=[*splits.notes, *notes])


def without_broken(splits: DataSplits, world: World) -> DataSplits:
    """Return the splits without broken images, which all ranks find together. Collective.

    A note names classes without a training image.
    """
    found = {}
    for part, image_set in (("train", splits.train), ("test", splits.test)):
        look = partial(find_broken, image_set, share=world.rank, shares=world.size, workers=torch.get_num_threads())
        everyone = world.allgather_object(
            raise_on_all_ranks(world, look, name=f"broken.{part}"), name=f"broken.{part}.all"
        )
        found[part] = replace(image_set, broken={row: why for theirs in everyone for row, why in theirs.items()})
    train = found["train"]
    # Broken samples of a custom dataset have no label.
    gone, left = sorted(set(train.broken) - set(splits.train.broken)), torch.from_numpy(train.ids)
    lost = train.task.present(train.labels[gone]) & ~train.task.present(train.labels[left])
    notes = [f"class {train.classes[place]} has no readable training image" for place in lost.nonzero().flatten()]
    return replace(splits, train=train, test=found["test"], notes=[*splits.notes, *notes])


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
    budget = open_budget(factory, settings, evaluated=tested, started=started)
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
        evaluated=len(corpus.evaluated_ids),
        clock=clock,
        logger=logger,
        called=corpus.train.called,
        flips=flips,
        flip_trial=finding,
        notes=[*notes, *notes_on_mean(factory, settings)],
        details=details,
    )


def open_budget(factory: Factory, settings: Config, *, evaluated: int, started: float) -> Budget:
    """Return the budget of the run. Collective.

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
    if seconds is not None and not settings.run.resume:
        step = work.step(settings.optimizer.batch_size * settings.optimizer.accumulate)
        least = (work.head_fit, "fitting the head") if settings.head.solved else (step, "a step")
        budget.check(least[0], what=least[1])
    return budget


def content_of(world: World, corpus: Corpus, feed: TrainFeed, evaluated: Inputs) -> dict[str, str]:
    """Return digests of all ranks' pixels for the splits in memory, and of the normalisation. Collective.

    They detect an image that was replaced by another one of its size, unlike paths and sizes of files. The mean and
    standard deviation may come from a file next to the weights.
    """
    replica, place = divmod(world.rank, world.size // corpus.plan.replicas)
    owned = corpus.plan.owned(replica), corpus.share(replica)
    mine: dict[str, int | None] = {}
    for split, images, ids in zip(("train", "test"), (feed.images, evaluated), owned):
        pixels = images.pixels if isinstance(images, Images) else None
        # The first rank of each replica.
        mine[split] = 0 if place else pixels.content(ids) if isinstance(pixels, MemoryPixels) else None
    everyone = world.allgather_object(mine, name="content")
    found = {}
    for split in mine:
        known = [part for theirs in everyone if (part := theirs[split]) is not None]
        if len(known) == world.size:
            found[f"{split} pixels"] = f"{sum(known) % 2**64:016x}"
    if isinstance(feed.images, Images):
        found["normalisation"] = repr((feed.images.transform.mean, feed.images.transform.std))
    return found


def load_share(
    config: Config, world: World, corpus: Corpus, *, replica: int, rows: int, model: nn.Module | None = None
) -> tuple[TrainFeed, Inputs, Normalisation | None, list[str]]:
    """Load the training and evaluation pixels of this rank's replica. Collective.

    Also returns, on rank 0, the normalisation, which may come with the weights of `model`; and notes.

    Ranks of a node share pixels, and each decodes a part. For `rows` see `TrainFeed`.

    Raises:
        BrokenImagesError: images are broken on some rank; names the broken images of all ranks; on all ranks.
    """
    broken: list[str] = []
    budget_bytes = memory_budget(world.local_size)
    pools, unshared = share_pools(config, world, corpus, budget_bytes=budget_bytes)
    # Rank 0's: on other nodes the card of the weights may be missing.
    found = raise_on_all_ranks(
        world, lambda: normalisation_of(config, corpus.train, model) if world.rank == 0 else None, name="statistics"
    )
    statistics = world.broadcast_object(None if found is None else found.statistics, name="statistics.of_rank_0")

    def load() -> tuple[TrainFeed, Inputs] | None:
        try:
            return open_feeds(
                corpus,
                config.data,
                seed=config.data_seed,
                replica=replica,
                budget_bytes=budget_bytes if reads_images(world, config.strategy, world.rank) else 0,
                statistics=statistics,
                fits_head=config.head.solved,
                pools=pools,
                rows=rows,
            )
        except BrokenImagesError as error:
            broken.extend(error.reasons)
            return None

    feeds = raise_on_all_ranks(world, load, name="pixels")
    everyone = world.allgather_object(broken, name="pixels.broken")
    if any(everyone):
        raise BrokenImagesError(sorted({reason for theirs in everyone for reason in theirs})).on_all_ranks()
    assert feeds is not None
    for pool in pools:
        if pool is not None:
            protect(pool.pixels)
    return *feeds, found, notes_on_sharing(unshared)


def prepare(config: Config, world: World, *, started: float | None = None) -> Job:
    """Build a run from its configuration. For `started` see `run`. Collective.

    Raises:
        HvfreezeError: the configuration, the data, the weights or the run directory is invalid; on all ranks.
    """
    asked, set_up = config, PhaseClock(SET_UP_PHASES)
    started, config = time.monotonic() if started is None else started, config.resolved()
    set_up.seconds["start"] = time.monotonic() - started
    check_equal(world, "configuration", to_dict(config), apart=PER_RANK)
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
    settings, file = to_dict(config), to_file(config)
    config = replace(config, optimizer=replace(config.optimizer, batch_size=corpus.plan.batch_size))
    blueprint = Blueprint.of(config.model, corpus, image_size=config.data.image_size, head=config.head.head)
    with set_up.within("model"):
        chain, notes = build_equal_model(config, world, blueprint)
    if world.rank == 0:
        notes += note_on_small_maps(config.model.model, chain.model, blueprint.image_shape)
    config, kept = with_pretrained_statistics(config, corpus, chain)
    job = assemble(config, world, directory, blueprint, chain, corpus, started=started, set_up=set_up)
    job.data_identities |= identities
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


def shares_of_classes(config: Config, corpus: Corpus) -> tuple[float | None, list[str]]:
    """Return the share of the most frequent training class, and a note, if classes are imbalanced.

    Text has no classes, and several labels per sample are not compared.
    """
    if config.data.data == TEXT or config.strategy.tasks is not None or corpus.train.kind != "classes":
        return None, []
    classes, found = corpus.train.classes, {}
    held = "held-out" if config.data.validation_fraction > 0 else "test"
    parts = {
        "training": (corpus.train, np.unique(np.concatenate(corpus.plan.shards))),
        held: (corpus.evaluated, corpus.evaluated_ids),
    }
    for part, (image_set, ids) in parts.items():
        labels = image_set.labels[torch.from_numpy(ids)]
        found[part] = majority_of(torch.bincount(labels, minlength=len(classes)))
    told = " and ".join(
        f"{share[1]:.1%} of the {part} samples have class {classes[share[0]]}".replace("%", " %")
        for part, share in found.items()
        if share is not None
    )
    note = (
        f"classes are imbalanced: {told}; always predicting this class would have that accuracy, so the "
        f"log also shows balanced accuracy (the mean recall of all classes)"
    )
    if config.optimizer.class_weights == "none" and found["training"]:
        note += "; use --class-weights balanced to weight rare classes more"
    training = found["training"]
    return training and training[1], [note] if told else []


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


def open_agreed_corpus(
    config: Config, world: World, *, holds_out: bool, clock: PhaseClock | None = None
) -> tuple[Corpus, dict[str, str]]:
    """Return the samples and their digests, after checking that they are equal on all ranks. Collective.

    For `holds_out` see `deal`, for `clock` see `open_corpus`.
    """
    clock = clock or PhaseClock(SET_UP_PHASES)
    replicas = raise_on_all_ranks(world, lambda: replicas_of(world, config.strategy), name="replicas")
    data, cache = config.data, config.cache
    if replicas > 1 and data.shuffle == "global" and cache.cache == "on" and not cache.cache_shared:
        raise UsageError(
            "--shuffle (global) needs --cache off or --cache-shared, because ranks exchange samples"
        ).on_all_ranks()
    corpus = open_corpus(
        config.data,
        world,
        seed=config.data_seed,
        batch_size=config.optimizer.batch_size,
        replicas=replicas,
        whole_batches=not config.head.solved,
        holds_out=holds_out,
        clock=clock,
    )
    remedy = "start all ranks with the same command, on equal data"
    if ":" in config.data.data:
        remedy = "the Dataset must return equal samples each time and on every rank; use --augment for random changes"
    identities = raise_on_all_ranks(world, corpus.identities, name="identities")
    check_equal(world, "data", identities, remedy=remedy)
    corpus = raise_on_all_ranks(world, lambda: with_task(config, corpus), name="task")
    if isinstance(corpus.task, Numbers):
        # Processors may round differently: all ranks use rank 0's result.
        shared = (corpus.task, corpus.train.labels, corpus.evaluated.labels)
        corpus = with_labels(corpus, *world.broadcast_object(shared, name="task.numbers"))
    with clock.within("decoding"):
        sampled = raise_on_all_ranks(world, corpus.sampled_pixels, name="sampled")
    check_equal(world, "pixels", sampled, remedy=remedy)
    return corpus, identities | {f"{split} sampled": digest for split, digest in sampled.items()}


def with_labels(corpus: Corpus, task: Task, train: Tensor, evaluated: Tensor) -> Corpus:
    """Return the samples with other labels."""
    held_out, trained = corpus.evaluated is corpus.train, replace(corpus.train, labels=train)
    return replace(
        corpus,
        task=task,
        train=trained,
        evaluated=trained if held_out else replace(corpus.evaluated, labels=evaluated),
    )


def with_task(config: Config, corpus: Corpus) -> Corpus:
    """Return the samples with the task of the models; class weights and standardisation come from training samples.

    Raises:
        UsageError: a setting does not fit the labels, or names an unknown class.
    """
    check_task(config, corpus)
    given, task = parse_class_weights(config.optimizer.class_weights), corpus.task
    ids = torch.from_numpy(np.unique(np.concatenate(corpus.plan.shards)))
    if corpus.train.weights is not None:
        task = replace(task, sample_weights=scaled_weights(corpus.train.weights, ids))
    if config.run.metric is not None:
        fitting = METRICS[task.kind]
        rule(config.run.metric in fitting, "metric", config.run.metric, f"one of {', '.join(fitting)} for {task.kind}")
        task = replace(task, metric=config.run.metric.replace("-", "_"))
    if isinstance(task, Numbers):
        task, train = replace(task, huber=config.optimizer.loss == "huber").standardised(corpus.train.labels, ids)
        return with_labels(corpus, task, train, task.from_units(corpus.evaluated.labels))
    if given is None:
        return replace(corpus, task=task)
    assert isinstance(task, Classes), "refused before"
    places = {meant_by(name): place for place, name in enumerate(corpus.train.classes)}
    if isinstance(given, dict):
        for name in given:
            known = did_you_mean(name, corpus.train.classes)
            wanted = f"one of the {len(places)} classes {first_few(corpus.train.classes)}{known}"
            rule(meant_by(name) in places, "class-weights", name, wanted)
    each = None if task.sample_weights is None else task.sample_weights[ids].double()
    counts = torch.bincount(corpus.train.labels[ids], each, minlength=task.outputs)
    by_place = given if isinstance(given, str) else {places[meant_by(name)]: each for name, each in given.items()}
    return replace(corpus, task=replace(task, weights=class_weights(counts, by_place)))


def check_task(config: Config, corpus: Corpus) -> None:
    """Raise UsageError for settings that do not fit the labels or the weights of the samples."""
    kind, strategy, optimizer = corpus.task.kind, config.strategy.strategy, config.optimizer
    other = kind != "classes"
    labels = {"labels": "several labels per sample", "numbers": "numbers"}.get(kind, "classes")
    for flag, value, bad, remedy in (
        ("strategy", strategy, other and not config.strategy.takes_any_labels, "use replicas, or another strategy"),
        ("class-weights", optimizer.class_weights, other and optimizer.class_weights != "none", "omit it"),
        (
            "label-smoothing",
            optimizer.label_smoothing,
            kind == "numbers" and optimizer.label_smoothing > 0,
            "omit it",
        ),
        ("loss", optimizer.loss, kind != "numbers" and "loss" in config.given, "omit it: it is for numbers"),
    ):
        if bad:
            raise UsageError(f"--{flag} ({value}) does not fit the dataset, which has {labels}; {remedy}")
    if corpus.train.weights is not None and not config.strategy.takes_weights:
        raise UsageError(
            f"--strategy ({strategy}) does not fit the dataset, which has sample weights; use --weight-column none, or "
            "another strategy"
        )


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
