"""What an exchange costs on the network that these ranks have, measured through the exchange itself."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from hvfreeze.ranks.world import World

SMALL_BYTES, LARGE_BYTES = 1024, 4 * 2**20
TRIED_BYTES = (64 * 2**10, 512 * 2**10, LARGE_BYTES)
ENOUGH_SECONDS, LONG_SECONDS = 0.1, 0.3
SMALL_TIMES, MOST_TIMES = 9, 16


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
    """Return what rank 0 measures, on every rank; takes half a second, and a second where a link has 1 Mbit/s.

    Collective: every rank of `world` must call this.
    """
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
