"""The material of benchmarks: a ResNet-18 on synthetic images of CIFAR's shape, set up as the program does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.benchmarks.contest import Pace
from analysis.benchmarks.ranks import Ranks
from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.comm.world import World
from hvfreeze.config.cache import CacheConfig
from hvfreeze.config.data import DataConfig
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch, Corpus
from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.images import ArraySource
from hvfreeze.data.shards import Ids, plan_shards
from hvfreeze.strategies.data_parallel import DataParallel
from hvfreeze.training.blueprint import Blueprint
from hvfreeze.training.build import assemble
from hvfreeze.training.job import Job
from hvfreeze.training.loop import train_step

BATCH_ROWS = 128
NUM_CLASSES = 10
CUTS = range(1, 6)
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-4
NEVER = 10**9
"""Steps after which a vote is due that no benchmark reaches."""

OBSERVED = FreezeConfig(freeze="gradient-norm", interval=NEVER, freeze_warmup=NEVER)

MANY_EPOCHS = 10**5
"""More than any case makes of a job."""

HeldBatch = tuple[Tensor, Tensor]
"""Images or activations, (B, C, H, W), and (B,) labels."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The common settings of the jobs of a case.

    Attributes:
        world: the ranks.
        scratch: a folder that this case may fill.
        batch_rows: samples of a rank and step.
        steps: of an epoch.
        side: of the images, in pixels.
        image_size: to which they are resized; None leaves them.
        epochs: that a run is to have; some plans depend on it.
    """

    world: World
    scratch: Path
    batch_rows: int = BATCH_ROWS
    steps: int = 4
    side: int = 32
    image_size: int | None = None
    epochs: int = 10

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        scratch: Path,
        pace: Pace,
        *,
        batch_rows: int = BATCH_ROWS,
        steps: int | None = None,
        **more: Any,
    ) -> Setting:
        """Return the setting of a case; a quick pace has small batches, and two steps where `steps` are given."""
        if steps is not None:
            more["steps"] = 2 if pace.quick else steps
        return cls(world=ranks.world, scratch=scratch, batch_rows=pace.rows(batch_rows), **more)

    def folder(self, name: str) -> Path:
        """Return an empty folder of this rank."""
        folder = self.scratch / f"{name}-{self.world.rank}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def job(
        self,
        name: str,
        *,
        cut: int = 0,
        augment: str = "none",
        cache: CacheConfig = CacheConfig(),  # noqa: B008  (frozen)
        freeze: FreezeConfig | None = None,
        compression: str = "none",
    ) -> Job:
        """Return a job as the program makes it, its model in training mode; all jobs start with equal weights.

        Collective: every rank of the world must call this.
        """
        static = FreezeConfig(freeze="static", cut=cut) if cut else FreezeConfig()
        config = Config(
            data=DataConfig(data="cifar10", augment=augment, image_size=self.image_size),
            optimizer=OptimizerConfig(
                epochs=self.epochs,
                batch_size=self.batch_rows,
                compression=compression,
                lr=LEARNING_RATE,
                momentum=MOMENTUM,
                weight_decay=WEIGHT_DECAY,
            ),
            freeze=freeze or static,
            cache=cache,
        ).resolved()
        corpus = made_up_corpus(self)
        blueprint = Blueprint.of(config.model, corpus, image_size=config.data.image_size)
        chain, _ = blueprint.build_from(config.run.seed)
        job = assemble(config, self.world, self.folder(name), blueprint, chain, corpus)
        replicas_of(job).chain.model.train()
        return job


def made_up_corpus(setting: Setting) -> Corpus:
    """Return random images with random labels, the same on every rank."""
    size = setting.world.size
    samples = size * setting.batch_rows * setting.steps
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (samples, 3, setting.side, setting.side), dtype=np.uint8)
    labels = generator.permutation(np.arange(samples) % NUM_CLASSES)
    images = ImageSet(
        name="cifar10",
        classes=tuple(map(str, range(NUM_CLASSES))),
        labels=torch.from_numpy(labels),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        flips=True,
        source=ArraySource(pixels=pixels, side=None),
    )
    ids = np.arange(samples, dtype=np.int64)
    plan = plan_shards(labels, ids, size=size, batch_size=setting.batch_rows, seed=0)
    return Corpus(train=images, evaluated=images, evaluated_ids=ids[:size], plan=plan, notes=[], task=images.task)


def replicas_of(job: Job) -> DataParallel:
    """Return the job's strategy, whose parts a case measures."""
    assert isinstance(job.strategy, DataParallel)
    return job.strategy


def held_batches(job: Job, *, epoch: int = 0) -> list[HeldBatch]:
    """Return an epoch's images and labels, loaded."""
    return [(job.feed.images.load(batch.ids, batch.views), batch.labels) for batch in job.feed.epoch(epoch)]


class HeldSteps:
    """Training steps of a job without a cache, on the images of its first epoch, which are in memory."""

    def __init__(self, job: Job) -> None:
        self.job = job
        batches, replicas = job.feed.epoch(0), replicas_of(job)
        images = {int(batch.ids[0]): x for batch, (x, _) in zip(batches, held_batches(job), strict=True)}

        def load(ids: Ids, views: Ids) -> Tensor:
            with job.clock.within("data"):
                return images[int(ids[0])]

        def run_blocks(x: Tensor, start: int, stop: int) -> Tensor:
            with job.clock.within("forward"):
                return replicas.halves.prefix(x, start, stop)

        rows = job.config.optimizer.batch_size
        replicas.training.activations = PrefixActivations(run_blocks=run_blocks, load_images=load, batch_rows=rows)
        job.strategy.begin_epoch([])
        self._batches: Iterator[Batch] = cycle(batches)

    def step(self) -> float:
        """Make one step of the real loop; return the loss."""
        return train_step(self.job, [next(self._batches)])


@dataclass
class EpochSteps:
    """The steps of a job's epochs, one after the other, from `epoch` on."""

    job: Job
    epoch: int

    def __post_init__(self) -> None:
        self._left: list[list[Batch]] = []

    def prepare(self) -> None:
        """Begin the next epoch where one has ended. Collective: every rank must call this."""
        if not self._left:
            self._left = self.job.steps_of(self.epoch)
            self.job.strategy.begin_epoch([batch for batches in self._left for batch in batches])
            self.epoch += 1

    def step(self) -> float:
        """Make one step of the real loop; return the loss."""
        return train_step(self.job, self._left.pop(0))
