"""Runs with each optimizer: a frozen block leaves it together with its state, and a stopped run continues."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hvfreeze.comm.world import World
from hvfreeze.config.tree import from_dict
from hvfreeze.data.batches import Batch
from hvfreeze.errors import UsageError
from hvfreeze.strategies import data_parallel
from hvfreeze.training import loop
from hvfreeze.training.build import prepare
from hvfreeze.training.job import Job
from hvfreeze.training.run import run
from tests.parallel.workers.checking import let_models_be_small, with_folder
from tests.parallel.workers.runs import SCHEDULED, configuration, interrupted, lines
from tests.single.training.test_sample_weights import table

KEPT = {"keep": "best", "early_stop": 2}
CACHED = {"augment": "views:2", "cache": "on"}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {
        "optimizer": "adamw",
        "lr": 0.002,
        "head_lr": "0.01",
        "no_decay_norms": True,
        **KEPT,
    },
    "lars": {"optimizer": "lars", "lr": 2.0, "label_smoothing": 0.1, "clip_grad": 0.5},
    "sgd": {"nesterov": True, "mixup": 0.4, "clip_grad": 0.5, "head_lr": "0.1", **CACHED},
}
STOP = 7
"""Behind the first change of the cut, in the middle of an interval."""


def watch_the_optimizer() -> list[int]:
    """Check after every step that exactly what trains is in the optimizer; return the list of cuts that were met."""
    make_step, cuts = loop.train_step, []

    def step(job: Job, batches: Sequence[Batch]) -> float:
        chain, optimizer = job.strategy.chain, job.strategy.optimizer  # type: ignore[attr-defined]
        frozen = [p for _, p in chain.named_parameters(0, job.strategy.cut)]
        before = [p.detach().clone() for p in frozen]
        loss = make_step(job, batches)
        assert all(torch.equal(p, old) for p, old in zip(frozen, before, strict=True)), "a frozen parameter moved"
        inside = {p for group in optimizer.param_groups for p in group["params"]}
        trained = {p for _, p in chain.named_parameters(job.strategy.cut)}
        assert inside == trained >= set(optimizer.state), "frozen parameters are still in the optimizer"
        cuts.append(job.strategy.cut)
        return loss

    loop.train_step = step
    return cuts


def compare_resumed(world: World, root: Path, name: str) -> str:
    settings = {**SCHEDULED, "schedule": "cosine", "checkpoint_every": "0", **SETTINGS[name]}
    cuts = watch_the_optimizer()
    straight = run(configuration(root / name, world.size, **settings), world)
    assert cuts[0] == 0 < cuts[STOP - 1], cuts
    stopped = root / f"{name}-stopped"
    interrupted(configuration(stopped, world.size, **settings), world, after=STOP)
    resumed = run(configuration(stopped, world.size, resume=True, **settings), world)
    assert resumed["parameter_digest"] == straight["parameter_digest"], f"{name}: differs when stopped after {STOP}"
    assert resumed.get("kept") == straight.get("kept") and ("kept" in straight) == ("keep" in settings)
    if world.rank == 0:
        assert (stopped / "model.pt").read_bytes() == (root / name / "model.pt").read_bytes()
        assert lines(stopped, "metrics") == lines(root / name, "metrics")
    return str(straight["parameter_digest"])


@with_folder
def check_ranks_of_other_arithmetic_are_refused(world: World, folder: Path) -> None:
    compute = data_parallel.arithmetic_of
    data_parallel.arithmetic_of = lambda shapes: f"{compute(shapes)} {world.rank}"
    try:
        prepare(configuration(folder / "odd", world.size, clip_grad=1.0), world)
    except UsageError as error:
        assert error.everywhere and "rank 1 and rank 0 compute different norms" in str(error), error
    else:
        assert world.size == 1, "ranks that would drift apart were not refused"
    finally:
        data_parallel.arithmetic_of = compute


@with_folder
def check_a_stopped_run_goes_on_and_mixing_is_the_same_from_a_cache(world: World, root: Path) -> None:
    make_step = loop.train_step
    digests = {}
    for name in SETTINGS:
        digests[name] = compare_resumed(world, root, name)
        loop.train_step = make_step
    assert len(set(digests.values())) == 3
    settings = {**SCHEDULED, "schedule": "cosine", **SETTINGS["sgd"], "cache": "off"}
    assert run(configuration(root / "uncached", world.size, **settings), world)["parameter_digest"] == digests["sgd"]


@with_folder
def check_a_step_is_that_of_one_process_on_the_weighted_samples_of_all_ranks(world: World, folder: Path) -> None:
    if world.rank == 0:
        table(folder / "images", {"rare": 4.5, "7.png": 3.0, "0.png": 0.0})
    world.barrier(name="table")
    data = {"data": str(folder / "images" / "labels.csv"), "model": "mlp-16", "augment": "none", "batch_size": 4}
    still = {"momentum": 0.0, "weight_decay": 0.0, "lr": 0.05, "threads": 1, "run_dir": str(folder / "run")}
    job = prepare(from_dict({**data, **still}), world)
    twin, batches = copy.deepcopy(job.strategy.chain.model), job.steps_of(0)[0]
    job.strategy.begin_epoch(batches)
    loop.train_step(job, batches)
    mine = batches[0].ids, job.feed.images.load(batches[0].ids, batches[0].views), batches[0].labels
    ids, images, labels = zip(*world.allgather_object(mine, name="seen"))
    # 17 common training images, one with weight 3, and 3 rare ones.
    files = [Path(job.factory.context.corpus.train.called(row)) for row in np.concatenate(ids)]
    weights = [3.0 if file.name == "7.png" else 4.5 if file.parent.name == "rare" else 1.0 for file in files]
    mean = (16 + 3 + 3 * 4.5) / 20
    assert "0.png" not in {file.name for file in files}
    # BatchNorm normalises each rank's batch.
    logits = torch.cat([twin(batch) for batch in images])
    losses = functional.cross_entropy(logits, torch.cat(labels), reduction="none")
    (losses * torch.tensor(weights) / mean).mean().backward()
    for (name, now), before in zip(job.strategy.chain.named_parameters(), twin.parameters(), strict=True):
        assert before.grad is not None
        torch.testing.assert_close(now, before - 0.05 * before.grad, msg=name)
    job.opened.model.close()


def setting(world: World, root: Path) -> World:
    let_models_be_small()
    return world
