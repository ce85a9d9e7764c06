"""What a step would take with another compression: the network measured, the compression tried, the step forecast."""

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

from hvfreeze.comm.gradient_exchange import Message, Named, lay_out, thin_and_whole
from hvfreeze.comm.low_rank import LowRankBucket, fits
from hvfreeze.comm.world import World
from hvfreeze.config.rules import parse_compression
from hvfreeze.timing import least_seconds

SMALL_BYTES, LARGE_BYTES = 1024, 4 * 2**20
TRIED_BYTES = (64 * 2**10, 512 * 2**10, LARGE_BYTES)
ENOUGH_SECONDS, LONG_SECONDS = 0.1, 0.3
SMALL_TIMES, MOST_TIMES, TIMES = 9, 16, 3


@dataclass(frozen=True)
class Network:
    """What all ranks need to sum a message: `latency_seconds` and its bytes over `bytes_per_second`."""

    bytes_per_second: float
    """Bytes of the message, of which a rank sends 2 (n - 1) / n times as many."""
    latency_seconds: float
    """Of a message of next to no bytes, on ranks that have nothing else under way."""

    def seconds(self, num_bytes: float) -> float:
        """Return how long a message takes once it is on its way."""
        return num_bytes / self.bytes_per_second

    def line_rate(self, size: int) -> float:
        """Return the bits that each of `size` ranks sends in a second."""
        return 8 * self.bytes_per_second * 2 * (size - 1) / size


def measure_network(world: World) -> Network:
    """Return what rank 0 measures; takes half a second, and a second where a link has 1 Mbit/s. Collective."""
    latency = statistics.median(timed(world, SMALL_BYTES, 1) for _ in range(SMALL_TIMES))
    for number_of_bytes in TRIED_BYTES:
        taken = timed(world, number_of_bytes, 1)
        enough = world.broadcast_object(taken > ENOUGH_SECONDS, name="network.enough")
        if enough:
            break
    else:
        # As the reducer sends its buckets: all are under way at once.
        times = max(1, min(MOST_TIMES, int(LONG_SECONDS / taken)))
        times = world.broadcast_object(times, name="network.times")
        taken, number_of_bytes = timed(world, LARGE_BYTES, times), LARGE_BYTES * times
    rate = number_of_bytes / max(taken - latency, taken / 10)
    return world.broadcast_object(Network(rate, latency), name="network.measured")


def timed(world: World, number_of_bytes: int, times: int) -> float:
    """Return the seconds in which `times` messages of so many bytes are summed. Collective."""
    messages = [torch.zeros(number_of_bytes // 4) for _ in range(times)]
    world.barrier(name="network.barrier")
    start = time.perf_counter()
    handles = [world.start_allreduce_(message, name=f"network.{i}") for i, message in enumerate(messages)]
    for handle in handles:
        world.wait(handle)
    return time.perf_counter() - start


CANDIDATES = ("none", "fp16", *(f"powersgd:{rank}" for rank in (32, 16, 8, 4, 2)))
"""In order of what they change: each keeps less of a gradient than the one before."""
CHOSEN = CANDIDATES[: CANDIDATES.index("powersgd:16") + 1]
"""What auto may choose. Rank 4 cost a point of accuracy in 156 steps (analysis/results/compression): others are for
those who ask for them."""
CLOSE = 1.05
"""A step as long as the shortest times this is as good: the transfer hides."""
WORTH_TRYING = 1.5
"""A forecast that is so many times the shortest may yet be wrong, one that is more is not."""
EXPOSED_SHARE = 0.1
"""The part of a step that waiting for an exchange may take before it should be made less often."""


@dataclass(frozen=True)
class Steps:
    """What steps were like on a rank, in seconds, without what they waited for others."""

    ready: Mapping[str, float]
    """From the begin of a step's last backward pass until a parameter's gradient was there."""
    backward: float
    """Of a step's last backward pass."""
    rest: float
    """Of all else in a step."""

    @property
    def compute(self) -> float:
        """A step's seconds if nothing had to be sent."""
        return self.backward + self.rest


@dataclass(frozen=True)
class StepForecast:
    """What a step would be with one compression, in seconds."""

    step: float
    exposed: float
    """Waiting for the exchange when the backward pass has ended."""


def forecast(
    messages: Sequence[Message], names: Sequence[str], steps: Steps, network: Network, *, own_seconds: float
) -> StepForecast:
    """Return a step's forecast from `names` by slot, this rank's `steps`, and the compression's own seconds."""
    ends = [max((steps.ready.get(names[slot], 0.0) for slot in message.slots), default=0.0) for message in messages]
    backward = max([steps.backward, *ends])
    exposed = max(0.0, last_arrival(messages, ends, network) - backward)
    return StepForecast(step=steps.compute + own_seconds + exposed, exposed=exposed)


def last_arrival(messages: Sequence[Message], ready: Sequence[float], network: Network) -> float:
    """Return when all messages have arrived that are ready at these times, one after the other on one link.

    A message waits for those before it to be ready; a second sum follows when the first has arrived. On an idle link
    a message first takes the time that ranks need to agree on it, behind another it has done so already.
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
    """Return the first compression in their order whose step is next to none longer than the shortest."""
    return first_of_the_shortest({name: each.step for name, each in forecasts.items()})


def first_of_the_shortest(seconds: Mapping[str, float]) -> str:
    """Return the first name whose `seconds` are next to none more than the fewest."""
    fewest = min(seconds.values())
    return next(name for name, each in seconds.items() if each <= CLOSE * fewest)


def worth_trying(forecasts: Mapping[str, StepForecast], chosen: str) -> tuple[str, ...]:
    """Return `chosen`, and what changes more and may be as short: steps themselves are to tell."""
    shortest, names = min(each.step for each in forecasts.values()), list(forecasts)
    behind = names[names.index(chosen) + 1 :]
    return (chosen, *(name for name in behind if forecasts[name].step <= WORTH_TRYING * shortest))


def batches_that_hide(exposed: float, batch_seconds: float) -> int:
    """Return after how many batches of so many seconds an exchange takes a tenth of the time, or less."""
    return max(1, math.ceil(exposed / (EXPOSED_SHARE / (1 - EXPOSED_SHARE) * batch_seconds)))


def own_seconds(named: Named, compression: str) -> float:
    """Return the seconds that a rank computes in a step for `compression`, beyond what it does without.

    The largest parameter that it applies to stands for all. Not a collective.
    """
    thin, whole = thin_and_whole(named, compression)
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
        """Nothing was sent."""

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
        seconds.append(least_seconds(work, times=TIMES))
    return max(0.0, seconds[1] - seconds[0]) * elements / gradient.numel()


def made_unlike(named: Named, world: World) -> frozenset[str]:
    """Return those of `CHOSEN` of which ranks would make different bits from the same sums. Collective."""
    mine = {}
    for compression in CHOSEN:
        kind, rank = parse_compression(compression)
        if kind == "powersgd":
            thin = [(name, parameter) for name, parameter in named if fits(parameter, rank=rank)]
            mine[compression] = LowRankBucket("probe", thin, range(len(thin)), size=1, rank=rank).probe()
    everyone = world.allgather_object(mine, name="gradients.low-rank.probes")
    return frozenset(name for name in mine if any(other[name] != everyone[0][name] for other in everyone))
