"""One rank that times training steps, started by `analysis.step_costs` through mpirun.

Every kind of step lives in the same ranks and takes its turn, so that whatever else the machine does meets all of them.
Steps are those of the program on images of CIFAR's shape: loading and augmenting a batch is part of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import torch

from analysis.benchmarks.contest import Contest, Side
from analysis.benchmarks.material import CUTS, EpochSteps, HeldBatch, Setting
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.rows.unfrozen import data_parallel
from hvfreeze.comm.world import end_job_on_exception
from hvfreeze.prefix.settings import CacheConfig
from hvfreeze.training.job import Job
from hvfreeze.training.loop import train_epoch

LIVE, CACHED, DDP = "live{}", "cached{}", "ddp"
STEPS, VIEWS = 4, 2
LEAST_ROUNDS = 20
"""A median of fewer is too uncertain, however long they take."""
LONG = 10**6
"""Epochs, of which none is the last."""


def main() -> None:
    """Time the steps and write each kind's seconds, those of its slowest rank, as JSON."""
    options = parse()
    torch.set_num_threads(1)
    ranks = Ranks()
    end_job_on_exception(ranks.world)
    setting = Setting(
        world=ranks.world,
        scratch=options.scratch,
        batch_rows=options.rows,
        steps=STEPS,
        image_size=options.image_size,
        epochs=LONG,
    )
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        sides = list(sides_of(ranks, setting, cuts=CUTS if options.seconds else CUTS[:1]))
    contest = Contest(ranks, sides, time.perf_counter)
    start, seconds = time.monotonic(), {}
    contest.warm_up()
    for number in count():
        contest.play(number, steps=1)
        seconds = contest.slowest()
        enough = number + 1 >= (LEAST_ROUNDS if options.seconds else 1)
        late = enough and time.monotonic() - start > options.seconds
        if ranks.agree(float(late)):
            break
    if ranks.rank == 0:
        options.out.write_text(json.dumps(seconds))
    ranks.world.close()


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m analysis.parts.step_sides", description=__doc__)
    parser.add_argument("--rows", type=int, required=True, help="of a batch")
    parser.add_argument("--image-size", type=int, required=True, help="side of the images that the model sees")
    parser.add_argument("--seconds", type=float, required=True, help="for all kinds together; 0 only sees that it runs")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder to fill")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def sides_of(ranks: Ranks, setting: Setting, *, cuts: Sequence[int]) -> Iterator[Side]:
    """Yield every kind of step at these cuts. Collective: every rank must call this."""
    for cut in (0, *cuts):
        job = setting.job(LIVE.format(cut), cut=cut, augment="fresh")
        yield epochs(job, 0, name=LIVE.format(cut))
    for cut in cuts:
        job = setting.job(CACHED.format(cut), cut=cut, augment=f"views:{VIEWS}", cache=CacheConfig(cache="on"))
        for epoch in range(VIEWS):
            train_epoch(job, epoch)
        yield epochs(job, VIEWS, name=CACHED.format(cut))
    loop = data_parallel(ranks, [], setting.scratch)
    loop.batches = loaded(setting.job(DDP, augment="fresh"))
    yield Side(DDP, loop.step)


def epochs(job: Job, first: int, *, name: str) -> Side:
    """Return the steps of a job's epochs from `first` on."""
    steps = EpochSteps(job, epoch=first)
    return Side(name, steps.step, prepare=steps.prepare)


def loaded(job: Job) -> Iterator[HeldBatch]:
    """Yield a job's images and labels, loaded when they are asked for."""
    for epoch in count():
        for batch in job.feed.epoch(epoch):
            yield job.feed.images.load(batch.ids, batch.views), batch.labels


if __name__ == "__main__":
    main()
