"""The program with faults built in: `faulty.py RANK:STEP:FAULT,... ARGUMENTS` does what hvfreeze ARGUMENTS does.

A fault happens on one rank before it makes the step. Step -2 is the beginning and -1 the end of the preparation, -4 is
when the rank has left MPI; `-` is no fault. From the step on at which a rank stops, the others wait for LIMIT seconds.
On ranks of a standing job, the worker `faulty:RANK:STEP:FAULT` runs the program; its faults end no process.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvfreeze.imports import kept_for_good

with kept_for_good():
    import torch

    import hvfreeze.training.build
    import hvfreeze.training.run
    from hvfreeze import optim
    from hvfreeze.__main__ import main
    from hvfreeze.comm import horovod_world
    from hvfreeze.comm.mpi_environment import claimed_rank
    from hvfreeze.comm.world import World
    from hvfreeze.config.tree import Config
    from hvfreeze.data.batches import Batch
    from hvfreeze.strategies.data_parallel import DataParallel
    from hvfreeze.training import loop
    from hvfreeze.training.build import prepare
    from hvfreeze.training.job import Job
    from tests.parallel.workers.checking import let_models_be_small
    from tests.parallel.workers.program import run

__all__ = ["run"]
LIMIT = 2.0

make_step = loop.train_step
leave = horovod_world.leave_mpi


def replicas_of(job: Job) -> DataParallel:
    assert isinstance(job.strategy, DataParallel)
    return job.strategy


def die(job: Job) -> None:
    """Die at a time that is noted, for tests of how soon a job ends."""
    job.directory.with_name("since").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def fail(job: Job) -> None:
    raise RuntimeError("injected")


def spin(job: Job) -> None:
    while True:
        pass


def perturb_a_weight(job: Job) -> None:
    with torch.no_grad():
        # Not the lowest bit, which the next update could round away.
        next(replicas_of(job).chain.model.parameters())[0, 0, 0, 0].view(torch.int32).bitwise_xor_(1 << 12)


def move_a_frozen_weight(job: Job) -> None:
    with torch.no_grad():
        next(replicas_of(job).chain.model.parameters()).add_(1e-6)


def freeze_alone(job: Job) -> None:
    replicas_of(job).freezer._move(2)


def spoil_the_loss(job: Job) -> None:
    loss = optim.Objective.loss
    optim.Objective.loss = lambda *args, **rest: loss(*args, **rest) * math.nan  # type: ignore[method-assign]


def spoil_the_statistics(job: Job) -> None:
    broken = (math.nan,) * len(job.block_names)
    replicas_of(job).freezer._seen.sums.norms = lambda: broken  # type: ignore[method-assign]


def fill_the_disk_of_the_log(job: Job) -> None:
    hvfreeze.runs.record.open_own = lambda path, flags: os.open("/dev/full", os.O_WRONLY)  # type: ignore[attr-defined]


def have_other_sources(job: None) -> None:
    hvfreeze.training.build.source_digest = lambda: "other"  # type: ignore[attr-defined]


FAULTS: dict[str, Callable[[Any], object]] = {
    "kill": die,
    "stop": lambda job: os.kill(os.getpid(), signal.SIGSTOP),
    "leave": lambda job: os.kill(os.getpid(), signal.SIGUSR1),
    "interrupt": lambda job: os.kill(os.getpid(), signal.SIGINT),
    "raise": fail,
    "sources": have_other_sources,
    "spin": spin,
    "perturb": perturb_a_weight,
    "freeze-alone": freeze_alone,
    "move-frozen": move_a_frozen_weight,
    "loss": spoil_the_loss,
    "statistics": spoil_the_statistics,
    "log": fill_the_disk_of_the_log,
}


def wait_for_the_checkpoint(job: Job) -> None:
    """Wait until no checkpoint is being written: which one a fault leaves must not depend on the disk's speed."""
    while list((job.directory / "checkpoints").glob(".step-*")):
        time.sleep(0.01)


def build_in(faults: str) -> None:
    """Make the faults happen when their time comes."""
    wanted = {}
    for entry in faults.split(",") if faults != "-" else []:
        rank, step, name = entry.split(":")
        wanted[int(rank), int(step)] = FAULTS[name]
    stops = {step for (_, step), fault in wanted.items() if fault in (FAULTS["stop"], FAULTS["spin"])}

    def nothing(job: Job | None) -> None:
        return

    def faulty_step(job: Job, batches: Sequence[Batch]) -> float:
        if job.step in stops:
            job.world.watch._limit = LIMIT  # type: ignore[attr-defined]
        fault = wanted.get((job.world.rank, job.step))
        if fault is not None:
            wait_for_the_checkpoint(job)
            fault(job)
        return make_step(job, batches)

    def faulty_preparation(config: Config, world: World, **more: Any) -> Job:
        wanted.get((world.rank, -2), nothing)(None)
        job = prepare(config, world, **more)
        wanted.get((world.rank, -1), nothing)(job)
        return job

    def faulty_end(mpi: Any) -> None:
        leave(mpi)
        wanted.get((claimed_rank(os.environ), -4), nothing)(None)

    horovod_world.leave_mpi = faulty_end
    loop.train_step = faulty_step
    hvfreeze.training.run.prepare = faulty_preparation  # type: ignore[attr-defined]


def setting(world: World, root: Path, *faults: str) -> World:
    """Build the faults into the program of a standing job."""
    let_models_be_small()
    build_in(":".join(faults))
    return world


if __name__ == "__main__":
    let_models_be_small()
    build_in(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
