"""A run made ready: what every rank must agree on, the samples, the model, and the parts put together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from hvfreeze.chain.blocks import Chain
from hvfreeze.config.tree import Config, to_dict
from hvfreeze.data.dealing import Corpus
from hvfreeze.named_code import code_sha256, is_named_code
from hvfreeze.ranks.agreement import check_equal, together
from hvfreeze.ranks.equal_models import broadcast_model
from hvfreeze.ranks.machine.share import bound_apart, crowding, threads_of_environment, threads_per_rank
from hvfreeze.ranks.world import World
from hvfreeze.runs.directory import PER_RANK, check_directory, directory_name, open_record
from hvfreeze.runs.environment import describe_environment, facts_of_this_rank, source_digest, version_of
from hvfreeze.runs.record import NullRecord
from hvfreeze.training.choice import place_of
from hvfreeze.training.job import Job
from hvfreeze.training.making.assembling import assemble
from hvfreeze.training.making.blueprint import Blueprint
from hvfreeze.training.making.cycle import rest_longer_where_cores_are_full
from hvfreeze.training.making.notes import notes_on_freezing
from hvfreeze.training.making.samples import open_corpus
from hvfreeze.training.progress import check_curves


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
    rests = []
    if config.strategy.strategy == "replicas":
        rests = rest_longer_where_cores_are_full(world, torch.get_num_threads())
    environment = environment_of(config, world)
    directory = usable_directory(config, world, environment)
    together(world, lambda: check_curves(wanted=config.run.tensorboard), name="curves")
    corpus, identities = agreed_corpus(config, world)
    blueprint = Blueprint.of(config.model, corpus, image_size=config.data.image_size)
    chain, notes = equal_model(config, world, blueprint)
    job = assemble(config, world, directory, blueprint, chain, corpus, started=started)
    job.data_identities = identities
    # Last, so that a run that could not start leaves its directory as it was.
    job.record = together(
        world,
        lambda: open_record(directory, to_dict(config), environment=environment) if world.rank == 0 else NullRecord(),
        name="record",
    )
    job.speaker.log_to(job.record.log)
    job.notes = [
        *corpus.notes,
        *notes,
        *notes_on_freezing(config, job.course.stages),
        *crowding(world),
        *bound_apart(world),
        *rests,
        *job.record.notes,
    ]
    return job


def environment_of(config: Config, world: World) -> dict[str, Any]:
    """Return what is recorded of the machines and the code, once all ranks are known to run the same.

    Collective: every rank of `world` must call this.
    """
    check_equal(world, "versions", versions())
    code = together(world, lambda: own_code(config), name="code")
    check_equal(world, "code", code)
    environment = describe_environment(world.allgather_object(facts_of_this_rank(), name="environment"))
    return environment | ({"code": code} if code else {})


def versions() -> dict[str, str | None]:
    """Return what every rank must run: the libraries' versions, and a digest of this package's own source."""
    found = {name: version_of(name) for name in ("torch", "horovod", "hvfreeze")}
    return {**found, "source": source_digest()}


def own_code(config: Config) -> dict[str, str]:
    """Return a digest of each file of the user's own that takes part, by flag."""
    named = {"model": config.model.model, "data": config.data.data}
    return {flag: code_sha256(flag, text) for flag, text in named.items() if is_named_code(text)}


def usable_directory(config: Config, world: World, environment: dict[str, Any]) -> Path:
    """Return the run directory, the same on every rank: the user's, or what rank 0 names it in `runs`.

    Collective: every rank of `world` must call this.

    Raises:
        HvfreezeError: it holds another run, or cannot be used; on all ranks.
    """
    named = directory_name(config.model.model, config.data.data, config.freeze.freeze)
    given = config.run.run_dir or str(Path("runs") / named)
    directory = Path(world.broadcast_object(given, name="run.directory")).resolve()
    together(
        world,
        lambda: check_directory(directory, to_dict(config), environment) if world.rank == 0 else None,
        name="directory",
    )
    return directory


def agreed_corpus(config: Config, world: World) -> tuple[Corpus, dict[str, str]]:
    """Return the samples, and digests of them that are equal on all ranks.

    Collective: every rank of `world` must call this.
    """
    _, replicas = together(world, lambda: place_of(world, config.strategy), name="replicas")
    corpus = open_corpus(
        config.data,
        world,
        seed=config.data_seed,
        batch_size=config.optimizer.batch_size,
        replicas=replicas,
        whole_batches=not config.head.solved,
    )
    identities = together(world, corpus.identities, name="identities")
    check_equal(world, "data", identities)
    check_equal(world, "pixels", together(world, corpus.sampled_pixels, name="sampled"))
    return corpus, identities


def equal_model(config: Config, world: World, blueprint: Blueprint) -> tuple[Chain, list[str]]:
    """Return the model, the same on every rank, and what the user should know; seeds torch's generator.

    Collective: every rank of `world` must call this.
    """
    if config.model.weights == "DEFAULT":
        # One rank per node downloads; the others find the file.
        together(world, lambda: blueprint.build_from(0) if world.local_rank == 0 else None, name="weights")
    chain, notes = together(world, lambda: blueprint.build_from(config.run.seed), name="model")
    broadcast_model(chain.model, world)
    # Dropout and the like differ between ranks; rank 0 goes on from where building has left the generator, so that a
    # run of one rank is plain PyTorch's.
    if world.rank > 0:
        torch.manual_seed(config.run.seed + world.rank)
    return chain, notes
