"""Predicts the time of a training step with each gradient compression from measured network and step times."""

from __future__ import annotations

import heapq
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvfreeze.comm.gradient_exchange import Message, Named, lay_out, split_by_compression
from hvfreeze.comm.low_rank import LowRankBucket, fits
from hvfreeze.comm.settings import parse_compression
from hvfreeze.comm.world import World
from hvfreeze.timing import least_seconds

TRIED_BYTES = (64 * 2**10, 512 * 2**10, 4 * 2**20)


@dataclass(frozen=True)
class Network:
    """The cost of an allreduce: `latency_seconds` plus bytes / `bytes_per_second`."""

    bytes_per_second: float
    """Message bytes per second; each rank sends 2 (n - 1) / n times as many."""
    latency_seconds: float
    """Seconds of an allreduce of a few bytes without other traffic."""

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of an allreduce of `num_bytes` once it has started."""
        return num_bytes / self.bytes_per_second

    def line_rate(self, size: int) -> float:
        """Return the bits per second that each of `size` ranks sends."""
        return 8 * self.bytes_per_second * 2 * (size - 1) / size


def measure_network(world: World) -> Network:
    """Measure the network on rank 0 and return the result on all ranks; takes 0.5 s, or 1 s at 1 Mbit/s. Collective."""
    latency = statistics.median(timed(world, 1024, 1) for _ in range(9))
    for number_of_bytes in TRIED_BYTES:
        taken = timed(world, number_of_bytes, 1)
        enough = world.broadcast_object(taken > 0.1, name="network.enough")
        if enough:
            break
    else:
        # As the reducer sends its buckets: all are under way at once.
        times = max(1, min(16, int(0.3 / taken)))
        times = world.broadcast_object(times, name="network.times")
        taken, number_of_bytes = timed(world, number_of_bytes, times), number_of_bytes * times
    rate = number_of_bytes / max(taken - latency, taken / 10)
    return world.broadcast_object(Network(rate, latency), name="network.measured")


def timed(world: World, number_of_bytes: int, times: int) -> float:
    """Return the seconds of `times` allreduces of `num_bytes` bytes. Collective."""
    messages = [torch.zeros(number_of_bytes // 4) for _ in range(times)]
    world.barrier(name="network.barrier")
    start = time.perf_counter()
    handles = [world.start_allreduce_(message, name=f"network.{i}") for i, message in enumerate(messages)]
    for handle in handles:
        world.wait(handle)
    return time.perf_counter() - start


CANDIDATES = ("none", "fp16", *(f"powersgd:{rank}" for rank in (32, 16, 8, 4, 2)))
"""Compressions in the order of their error: each keeps less of a gradient than the one before."""
CHOSEN = CANDIDATES[: CANDIDATES.index("powersgd:16") + 1]
"""Compressions that `auto` may choose. Rank 4 lost a point of accuracy in 156 steps (analysis/results/compression), so
the others need an explicit --compression."""
CLOSE = 1.05
"""A step of up to this many times the shortest one counts as equally fast: its communication is hidden."""
WORTH_TRYING = 1.5
"""A predicted step of up to this many times the shortest one is measured too, because the prediction may be wrong."""
EXPOSED_SHARE = 0.1
"""Share of a step that waiting for the exchange may take before a larger --accumulate is recommended."""


@dataclass(frozen=True)
class Steps:
    """The seconds of a rank's steps without waiting for other ranks."""

    ready: Mapping[str, float]
    """Seconds from the begin of the step's last backward pass to each parameter's gradient."""
    backward: float
    """Seconds of a step's last backward pass."""
    rest: float
    """Seconds of the rest of a step."""

    @property
    def compute(self) -> float:
        """Seconds of a step without communication."""
        return self.backward + self.rest


@dataclass(frozen=True)
class StepForecast:
    """The predicted step with one compression, in seconds."""

    step: float
    exposed: float
    """Seconds of waiting for the exchange after the backward pass."""


def forecast(
    messages: Sequence[Message], names: Sequence[str], steps: Steps, network: Network, *, own_seconds: float
) -> StepForecast:
    """Return the predicted step for `messages` of the parameters `names`, given this rank's `steps`."""
    ends = [max((steps.ready.get(names[slot], 0.0) for slot in message.slots), default=0.0) for message in messages]
    backward = max([steps.backward, *ends])
    exposed = max(0.0, last_arrival(messages, ends, network) - backward)
    return StepForecast(step=steps.compute + own_seconds + exposed, exposed=exposed)


def last_arrival(messages: Sequence[Message], ready: Sequence[float], network: Network) -> float:
    """Return when all messages have arrived if they are ready at these times and share one link.

    A message waits until the messages before it are ready. Its second allreduce, if any, starts when the first has
    arrived. On an idle link each message adds the latency of the ranks' agreement; on a busy link that is hidden.
    """
    queue: list[tuple[float, int, float, float]] = []
    latest = 0.0
    for place, (message, since) in enumerate(zip(messages, ready, strict=True)):
        latest = max(latest, since)
        queue.append((latest, place, message.first_bytes, message.second_bytes))
    heapq.heapify(queue)
    free = 0.0
    while queue:
        since, place, number_of_bytes, following = heapq.heappop(queue)
        begin = since + network.latency_seconds if since >= free else free
        free = begin + network.seconds(number_of_bytes)
        if following:
            heapq.heappush(queue, (free, place, following, 0))
    return free


def choose(forecasts: Mapping[str, StepForecast]) -> str:
    """Return the first compression, in order of error, whose step is about as short as the shortest."""
    return choose_shortest({name: each.step for name, each in forecasts.items()})


def choose_shortest(seconds: Mapping[str, float]) -> str:
    """Return the first name whose seconds are about as few as the fewest."""
    fewest = min(seconds.values())
    return next(name for name, each in seconds.items() if each <= CLOSE * fewest)


def worth_trying(forecasts: Mapping[str, StepForecast], chosen: str) -> tuple[str, ...]:
    """Return `chosen` and the more lossy compressions that may be as fast, to be measured."""
    shortest, names = min(each.step for each in forecasts.values()), list(forecasts)
    behind = names[names.index(chosen) + 1 :]
    return (chosen, *(name for name in behind if forecasts[name].step <= WORTH_TRYING * shortest))


def batches_that_hide(exposed: float, batch_seconds: float) -> int:
    """Return the number of batches per step with which the exchange takes a tenth of the time, or less."""
    return max(1, math.ceil(exposed / (EXPOSED_SHARE / (1 - EXPOSED_SHARE) * batch_seconds)))


def own_seconds(named: Named, compression: str) -> float:
    """Return the seconds that a rank spends on compression in each step.

    Measured on the largest compressed parameter and extrapolated to all. Not a collective.
    """
    thin, whole = split_by_compression(named, compression)
    slots = thin or (whole if compression == "fp16" else [])
    if not slots:
        return 0.0
    largest = max(slots, key=lambda slot: named[slot][1].numel())
    tried, elements = named[largest], sum(named[slot][1].numel() for slot in slots)
    (bucket,) = lay_out([tried], [0], compression=compression, rank=0, size=2, bucket_bytes=1, exponents={})
    gradient = tried[1].detach()
    into = torch.zeros_like(gradient)

    def send(wire: Tensor, name: str) -> list[Any]:
        return []

    def wait(handle: Any) -> None:
        """Do nothing: no message is sent."""

    def step() -> None:
        bucket.begin()
        bucket.copy_in(0, gradient)
        bucket.start(send)
        bucket.advance(send, wait)
        bucket.finish(send, wait)

    seconds = []
    for work in (lambda: torch.mul(gradient, 0.5, out=into), step):
        # The first time brings memory up to speed, and does not count.
        work()
        seconds.append(least_seconds(work, times=3))
    return max(0.0, seconds[1] - seconds[0]) * elements / gradient.numel()


def find_unequal_compressions(named: Named, world: World) -> frozenset[str]:
    """Return the compressions of `CHOSEN` that give different bits on different ranks. Collective."""
    local = {}
    for compression in CHOSEN:
        kind, rank = parse_compression(compression)
        if kind == "powersgd":
            thin = [(name, parameter) for name, parameter in named if fits(parameter, rank=rank)]
            local[compression] = LowRankBucket("probe", thin, range(len(thin)), size=1, rank=rank).probe()
    gathered = world.allgather_object(local, name="gradients.low-rank.probes")
    return frozenset(name for name in local if any(other[name] != gathered[0][name] for other in gathered))
