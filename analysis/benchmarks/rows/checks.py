"""Benchmarks of all checks: their share of an epoch, and the index of cached rows with many files."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import torch

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import BATCH_ROWS, HeldSteps, Setting, made_up_corpus
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.rows.inputs import STEPS_OF_CIFAR
from hvfreeze.cache.file.format import Keys, pack_keys
from hvfreeze.cache.index import RowIndex
from hvfreeze.runs.checkpoint_file import packed
from hvfreeze.runs.environment import source_digest
from hvfreeze.training.job import Job

IMAGES = 25_000
"""Largest number of samples of a rank: CIFAR-10's, shared by two."""
IDS, MANY, FEW = 320_000, 256, 16

EPOCH = Duel(
    name="checks_of_an_epoch",
    ours="checks",
    reference="step",
    bound=1.02,
    ratio=lambda checks, step: 1 + checks / (STEPS_OF_CIFAR * step),
    alike=False,
    what=f"1 + (every check of an epoch and of a job's start: {STEPS_OF_CIFAR} comparisons of what is frozen; digests "
    "of the replicas, a checkpoint, the sources, the data and some pixels) / "
    f"({STEPS_OF_CIFAR} steps of a ResNet-18, 32 px, nothing frozen)",
)
INDEX = Duel(
    name="index_of_256_files",
    ours="many",
    reference="few",
    bound=1.5,
    what=f"finding the rows of {IDS} ids stored in {MANY} files, against the same in {FEW}: one sort of all ids each",
)


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    if EPOCH.name in wanted:
        setting = Setting.of(ranks, scratch, pace)
        job = setting.job("step")
        steps = HeldSteps(job)
        yield from hold(
            ranks, [Side("checks", Checks(setting, job).make), Side("step", steps.step)], [EPOCH], pace=pace
        )
    if INDEX.name in wanted:
        ids = IDS // (100 if pace.quick else 1)
        sides = [Side(name, Index(ids, files=files).build) for name, files in (("many", MANY), ("few", FEW))]
        yield from hold(ranks, sides, [INDEX], pace=pace)


class Checks:
    """All checks that a run makes to know that replicas, files, code and data are what they should be."""

    def __init__(self, setting: Setting, job: Job) -> None:
        self.job, self.world = job, setting.world
        full = Setting(world=setting.world, scratch=setting.scratch, steps=IMAGES // BATCH_ROWS)
        self.corpus = made_up_corpus(full if setting.batch_rows == BATCH_ROWS else setting)
        self.state = packed(job.strategy.state_dict().shared)

    def make(self) -> float:
        """Make them once; return a number from them."""
        signals = torch.zeros(4, dtype=torch.int64)
        for _ in range(STEPS_OF_CIFAR):
            self.world.allreduce_sum(signals, name="bench.signals")
        self.job.strategy.settle()
        found = [self.job.strategy.check(step=0), source_digest(), *self.corpus.identities().values()]
        found += self.corpus.sampled_pixels().values()
        self.world.allgather_object(found, name="bench.digests")
        return float(hashlib.sha256(memoryview(self.state.numpy())).digest()[0])


class Index:
    """The rows of many ids, in files of equally many."""

    def __init__(self, ids: int, *, files: int) -> None:
        keys = pack_keys(np.arange(ids), np.zeros(ids, np.int64))
        order = np.random.default_rng(0).permutation(ids)
        self.parts: list[Keys] = [np.sort(keys[chosen]) for chosen in np.array_split(order, files)]
        self.asked = keys[order[:BATCH_ROWS]]

    def build(self) -> float:
        """Build the index as a store does that opens all of the files; return how many of some rows are there."""
        index = RowIndex(self.parts[0])
        index.extend(self.parts)
        for number, keys in enumerate(self.parts):
            index.place(keys, part=number, rows=np.arange(len(keys)))
        return float((~index.missing(self.asked)).sum())
