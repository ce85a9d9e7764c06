"""Replicas of a model with buffers of other kinds than BatchNorm's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.tree import from_dict
from hvfreeze.errors import DivergedError, NumericsError
from hvfreeze.optim import Objective
from hvfreeze.strategies.base import State
from hvfreeze.training.build import prepare
from hvfreeze.training.job import Job

MODEL = """
import torch
from torch import nn


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().mean((0, 2, 3))
        return x


def make(num_classes):
    head = nn.Linear(12, num_classes)
    return nn.Sequential(nn.Conv2d(3, 3, 3), Counting(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), head)


def normalised(num_classes):
    norms = nn.InstanceNorm2d(3, track_running_stats=True), nn.BatchNorm2d(3)
    return nn.Sequential(nn.Conv2d(3, 3, 3), *norms, *list(make(num_classes))[2:])


def scaled(num_classes):
    model = make(num_classes)
    del model[1].seen
    model[1].register_buffer("seen", torch.zeros(3), persistent=False)
    return model
"""


class Other(SoloWorld):
    """This rank and one that has met other samples."""

    size = 2

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        met = {key: digest[::-1] for key, digest in value.items()} if name == "replica.tensors" else value
        return [value, met]


@contextmanager
def job_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Iterator[Job]:
    (folder / "counting_network.py").write_text(MODEL)
    monkeypatch.syspath_prepend(folder)
    settings = {"model": "counting_network:make", "train_samples": 40, "batch_size": 8, "epochs": 1, "threads": 1}
    job = prepare(from_dict({**settings, "quiet": True, "run_dir": str(folder / "run"), **changes}), SoloWorld())
    try:
        yield job
    finally:
        job.strategy.close()
        job.record.close()


@pytest.mark.parametrize("strategy", ["replicas", "grid"])
def test_a_buffer_that_depends_on_a_ranks_samples_is_refused_after_the_first_step(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_of(tmp_path, monkeypatch, strategy=strategy) as job:
        trained: Any = job.strategy
        steps = job.steps_of(0)
        trained.begin_epoch([batch for batches in steps for batch in batches])
        trained.freezer.world = trained.world = Other()
        with pytest.raises(DivergedError, match=r"after step 1: buffer 1\.seen differs"):
            trained.step(steps[0], rate=0.1, leave=False)


def test_a_checkpoint_with_the_statistics_of_batchnorm_alone_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_of(tmp_path, monkeypatch, model="counting_network:normalised") as job:
        shared, own = deepcopy(job.strategy.state_dict())
        instance, batch = own["statistics"][:2], own["statistics"][2:]
        assert len(instance) == len(batch) == 2
        shared["model"]["1.running_mean"].fill_(3.0)
        job.strategy.load_state_dict(State(shared, {**own, "statistics": [each + 1 for each in batch]}))
        model = job.strategy.chain.model  # type: ignore[attr-defined]
        assert model[1].running_mean.tolist() == [3.0] * 3
        assert model[2].running_mean.tolist() == [1.0] * 3


@pytest.mark.parametrize("strategy", ["replicas", "local-sgd"])
def test_a_buffer_that_the_state_dict_omits_is_saved(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_of(tmp_path, monkeypatch, model="counting_network:scaled", strategy=strategy) as job:
        counting = job.factory.context.chain.model.get_submodule("1")
        counting.get_buffer("seen").fill_(2.0)
        shared, own = deepcopy(job.strategy.state_dict())
        counting.get_buffer("seen").fill_(5.0)
        job.strategy.load_state_dict(State(shared, own))
        assert counting.get_buffer("seen").tolist() == [2.0] * 3
        # As in a checkpoint of an earlier version.
        del shared["buffers"]
        job.strategy.load_state_dict(State(shared, {**own, "buffers": []}))
        assert counting.get_buffer("seen").tolist() == [2.0] * 3


def test_frozen_statistics_come_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model": "counting_network:normalised", "freeze": "static", "cut": 2}
    with job_of(tmp_path, monkeypatch, strategy="local-sgd", **given) as job:
        shared, own = deepcopy(job.strategy.state_dict())
        shared["model"]["2.running_mean"].fill_(3.0)
        job.strategy.load_state_dict(State(shared, own))
        assert job.factory.context.chain.model.get_buffer("2.running_mean").tolist() == [3.0] * 3


@pytest.mark.parametrize(
    ("strategy", "changes", "alone"),
    [("replicas", {}, False), ("local-sgd", {}, True), ("subnets", {"model": "mlp-4x4"}, True)],
)
def test_a_rank_that_trains_alone_ends_the_job_where_its_loss_is_nan(
    strategy: str, changes: dict[str, Any], alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Objective.loss
    monkeypatch.setattr(Objective, "loss", lambda *given: compute(*given) * math.nan)
    with job_of(tmp_path, monkeypatch, strategy=strategy, **changes) as job:
        batches = job.steps_of(0)[0]
        job.strategy.begin_epoch(batches)
        # Not at the end of the round.
        with pytest.raises(NumericsError, match=r"^step 0: the loss is NaN or Inf; the model was not updated") as error:
            job.strategy.step(batches, rate=0.1, leave=False)
        assert error.value.everywhere is not alone
