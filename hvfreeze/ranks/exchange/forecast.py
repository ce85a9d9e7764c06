"""How long a step takes with each compression on a network, from what a rank's own steps were like: pure functions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvfreeze.ranks.exchange.layout import Message
from hvfreeze.ranks.exchange.network import Network

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
class Forecast:
    """What a step would be with one compression, in seconds."""

    step: float
    exposed: float
    """Waiting for the exchange when the backward pass has ended."""


def forecast(
    messages: Sequence[Message], names: Sequence[str], steps: Steps, network: Network, *, own_seconds: float
) -> Forecast:
    """Return what a step would be.

    Args:
        messages: what is exchanged, in the order in which it starts.
        names: of the parameters, by slot.
        steps: what this rank's own steps are like.
        network: what a message costs.
        own_seconds: what the compression computes in a step.
    """
    ends = [max((steps.ready.get(names[slot], 0.0) for slot in message.slots), default=0.0) for message in messages]
    backward = max([steps.backward, *ends])
    exposed = max(0.0, last_arrival(messages, ends, network) - backward)
    return Forecast(step=steps.compute + own_seconds + exposed, exposed=exposed)


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


def choose(forecasts: Mapping[str, Forecast]) -> str:
    """Return the first compression in their order whose step is next to none longer than the shortest."""
    return first_of_the_shortest({name: each.step for name, each in forecasts.items()})


def first_of_the_shortest(seconds: Mapping[str, float]) -> str:
    """Return the first name whose `seconds` are next to none more than the fewest."""
    fewest = min(seconds.values())
    return next(name for name, each in seconds.items() if each <= CLOSE * fewest)


def worth_trying(forecasts: Mapping[str, Forecast], chosen: str) -> tuple[str, ...]:
    """Return `chosen`, and what changes more and may be as short: steps themselves are to tell."""
    shortest, names = min(each.step for each in forecasts.values()), list(forecasts)
    behind = names[names.index(chosen) + 1 :]
    return (chosen, *(name for name in behind if forecasts[name].step <= WORTH_TRYING * shortest))


def batches_that_hide(exposed: float, batch_seconds: float) -> int:
    """Return after how many batches of so many seconds an exchange takes a tenth of the time, or less."""
    return max(1, math.ceil(exposed / (EXPOSED_SHARE / (1 - EXPOSED_SHARE) * batch_seconds)))
