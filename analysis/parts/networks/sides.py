"""One rank of a network's measurement: ways of training a ResNet-18 that take turns on the same nodes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from analysis.benchmarks.contest import ABSENT, FUSED, UNFUSED
from analysis.benchmarks.material import HeldBatch, HeldSteps, Setting, held_batches, replicas_of
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.references import PlainLoop, over_gloo, resnet, sgd
from analysis.parts.networks.tables import ALONE, NOTHING_SENT
from analysis.parts.networks.turns import leave_turn
from hvfreeze.comm.compression_cost import CHOSEN
from hvfreeze.comm.mpi_environment import CYCLE_TIME
from hvfreeze.comm.world import SoloWorld
from hvfreeze.strategies.compression_choice import ROUNDS as TRIED_ROUNDS
from hvfreeze.strategies.compression_choice import TRIED_STEPS

BATCH_ROWS, SIDE_PIXELS = 64, 32
LOW_RANK = 4
FIRST_STEPS, WARM_STEPS, WARM_AGAIN = 5, 8, 1
"""Steps of ours before it compresses; untimed steps of each way at first, and after a restart of Horovod."""
TRYING_STEPS = FIRST_STEPS + len(CHOSEN) * TRIED_ROUNDS * TRIED_STEPS + 1
"""After which `auto` has made its choice."""
ROUNDS, ROUND_SECONDS, LEAST_STEPS, MOST_STEPS = 4, 1.5, 2, 10
"""More rounds of fewer steps: what a machine does besides lasts seconds, and takes all ways of a round alike."""
SETTLED_SECONDS = 0.1
"""After which nothing is on its way between ranks that have met."""


OURS, HOROVODS, GLOOS = "ours", "horovods", "gloos"


@dataclass(frozen=True)
class Way:
    """A way of training: how a step is made, what it has to tell, and its first steps, which are not timed."""

    step: Callable[[], float]
    tell: Callable[[], dict[str, Any]] = dict
    warm: int = WARM_STEPS


def measure(job: str, out: Path, scratch: Path, *, quick: bool) -> None:
    """Write what the steps of this job's ways took, round by round, on the slowest rank, to `out`. Collective.

    It takes turns with the other jobs; the first begins when all are ready.
    """
    torch.set_num_threads(1)
    ranks = Ranks()
    with contextlib.redirect_stdout(io.StringIO()):
        ways = JOBS[job](ranks, scratch, 8 if quick else BATCH_ROWS)
        seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
        for number in range(1 if quick else ROUNDS):
            ranks.rest()
            time.sleep(SETTLED_SECONDS)
            leave_turn(scratch, job, ranks.rank, number)
            for name, way in ways.items():
                warm = WARM_AGAIN if number or quick else way.warm
                clocked = timed_alone if name == ALONE else timed
                seconds[name].append(clocked(ranks, way, warm=warm, quick=quick))
        cycle = "" if job == GLOOS else os.environ.get(CYCLE_TIME, "1")
        told = {name: {**way.tell(), "cycle_ms": cycle} for name, way in ways.items()}
    if ranks.rank == 0:
        out.write_text(json.dumps({"seconds": seconds, "told": told}), encoding="utf-8")
    ranks.close()


def timed(ranks: Ranks, way: Way, *, warm: int, quick: bool) -> list[float]:
    """Return the seconds of a round's steps, on the slowest rank. Collective."""
    for _ in range(warm):
        way.step()
    mine: list[float] = []
    while len(mine) < LEAST_STEPS or not ranks.agree(float(quick or sum(mine) > ROUND_SECONDS)):
        ranks.barrier()
        start = time.perf_counter()
        way.step()
        mine.append(time.perf_counter() - start)
        if len(mine) == MOST_STEPS:
            break
    return [max(step) for step in zip(*ranks.gather(mine), strict=True)]


def timed_alone(ranks: Ranks, way: Way, *, warm: int, quick: bool) -> list[float]:
    """Return the seconds of a round's steps on rank 0 while all others rest. Collective."""
    found: list[float] = []
    if ranks.rank == 0:
        for _ in range(warm):
            way.step()
        while len(found) < LEAST_STEPS or not (quick or sum(found) > ROUND_SECONDS or len(found) == MOST_STEPS):
            start = time.perf_counter()
            way.step()
            found.append(time.perf_counter() - start)
    ranks.rest()
    return found


def ways_of_ours(ranks: Ranks, scratch: Path, batch_rows: int) -> dict[str, Way]:
    """Return this library's ways, on Horovod as it sets it up. Collective."""
    ranks.use(UNFUSED, threads=torch.get_num_threads())
    setting = Setting(world=ranks.world, scratch=scratch, batch_rows=batch_rows, side=SIDE_PIXELS)

    def ours(name: str, compression: str) -> Way:
        job = setting.job(name, compression=compression)
        replicas_of(job).reducer.uncompressed_steps = FIRST_STEPS
        warm = TRYING_STEPS if compression == "auto" else WARM_STEPS
        choice = replicas_of(job).compression
        return Way(HeldSteps(job).step, dict if choice is None else choice.report, warm=warm)

    return {
        NOTHING_SENT: Way(by_itself(ranks, scratch, batch_rows, OURS)),
        "auto": ours("auto", "auto"),
        "uncompressed": ours("uncompressed", "none"),
        "fp16": ours("fp16", "fp16"),
        "powersgd": ours("powersgd", f"powersgd:{LOW_RANK}"),
    }


def ways_of_horovod(ranks: Ranks, scratch: Path, batch_rows: int) -> dict[str, Way]:
    """Return the way of a Horovod user, with the rest between two looks that ours has. Collective."""
    batches = batches_of(ranks, scratch, batch_rows)
    ranks.use(FUSED, threads=torch.get_num_threads())
    return {"Horovod fp16": Way(horovod(batches).step)}


def ways_of_gloo(ranks: Ranks, scratch: Path, batch_rows: int) -> dict[str, Way]:
    """Return the ways in which nothing of Horovod runs. Collective."""
    batches = batches_of(ranks, scratch, batch_rows)
    ranks.use(ABSENT)
    return {
        ALONE: Way(by_itself(ranks, scratch, batch_rows, GLOOS)),
        "DDP + PowerSGD": Way(data_parallel(ranks, batches, scratch).step),
    }


JOBS: dict[str, Callable[[Ranks, Path, int], dict[str, Way]]] = {
    OURS: ways_of_ours,
    HOROVODS: ways_of_horovod,
    GLOOS: ways_of_gloo,
}
"""Horovod is set up once per process, and differently for each side, so sides are separate jobs that take turns."""


def batches_of(ranks: Ranks, scratch: Path, batch_rows: int) -> list[HeldBatch]:
    """Return this rank's batches, in memory. Collective."""
    setting = Setting(world=ranks.world, scratch=scratch, batch_rows=batch_rows, side=SIDE_PIXELS)
    return held_batches(setting.job("batches"))


def by_itself(ranks: Ranks, scratch: Path, batch_rows: int, job: str) -> Callable[[], float]:
    """Return the step of a rank that trains alone."""
    folder = scratch / f"alone-{job}-{ranks.rank}"
    folder.mkdir()
    setting = Setting(world=SoloWorld(), scratch=folder, batch_rows=batch_rows, side=SIDE_PIXELS)
    return HeldSteps(setting.job("alone")).step


def horovod(batches: list[HeldBatch]) -> PlainLoop:
    """Return the loop of a Horovod user with its own halves; the weights' layout is what it takes."""
    import horovod.torch as hvd

    model = resnet()
    model.train()
    half = hvd.Compression.fp16
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), compression=half)
    return PlainLoop(model, [optimizer], batches)


class InTurn:
    """torch.distributed for torch's hook, whose callbacks wait in gloo's own threads and end the process: each of its
    sums is complete before the next begins.
    """

    def __getattr__(self, name: str) -> Any:
        """Return what torch.distributed has."""
        return getattr(distributed, name)

    def all_reduce(self, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        """Sum `tensor`, and return what has ended already."""
        distributed.all_reduce(tensor, group=group)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)


def data_parallel(ranks: Ranks, batches: list[HeldBatch], scratch: Path) -> PlainLoop:
    """Return the loop of a DistributedDataParallel user over gloo, with torch's PowerSGD from the third step on."""
    interface = "eth0" if Path("/sys/class/net/eth0").exists() else "lo"
    wrapped = over_gloo(ranks, scratch, interface=interface)
    vars(powerSGD_hook)["dist"] = InTurn()
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=LOW_RANK, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return PlainLoop(wrapped, [sgd(wrapped.module)], batches)
