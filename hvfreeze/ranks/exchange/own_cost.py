"""What a compression computes in a step: how long one parameter takes, scaled to all, and whether ranks do it alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.config.rules import parse_compression
from hvfreeze.ranks.exchange.buckets import Bucket
from hvfreeze.ranks.exchange.halves import HalfCopy
from hvfreeze.ranks.exchange.layout import thin_and_whole
from hvfreeze.ranks.exchange.low_rank.parcel import LowRank, fits
from hvfreeze.ranks.world import World

TIMES = 3


def own_seconds(named: Sequence[tuple[str, nn.Parameter]], compression: str) -> float:
    """Return the seconds that a rank computes in a step for `compression`, beyond what it does without. No collective.

    The largest parameter that it applies to stands for all.
    """
    kind, rank = parse_compression(compression)
    thin, whole = thin_and_whole(named, compression)
    slots = thin if kind == "powersgd" else whole if kind == "fp16" else []
    if not slots:
        return 0.0
    largest = max(slots, key=lambda slot: named[slot][1].numel())
    tried, elements = named[largest], sum(named[slot][1].numel() for slot in slots)
    parcel: Bucket | LowRank
    if kind == "powersgd":
        parcel = LowRank("tried", [tried], [0], size=2, rank=rank)
    else:
        parcel = half_bucket(*tried)
    gradient = tried[1].detach()
    return max(0.0, trial(parcel, gradient) - plain(gradient)) * elements / gradient.numel()


def made_unlike(named: Sequence[tuple[str, nn.Parameter]], compressions: Sequence[str], world: World) -> frozenset[str]:
    """Return those of `compressions` of which ranks would make different bits from the same sums. Collective."""
    kinds = {name: parse_compression(name) for name in compressions}
    mine = {name: probe_of(named, rank=rank) for name, (kind, rank) in kinds.items() if kind == "powersgd"}
    everyone = world.allgather_object(mine, name="gradients.low-rank.probes")
    return frozenset(name for name in mine if any(other[name] != everyone[0][name] for other in everyone))


def probe_of(named: Sequence[tuple[str, nn.Parameter]], *, rank: int) -> str:
    """Return a digest of what this rank makes of fixed numbers, in the shapes of those parameters that `fits`."""
    thin = [(name, parameter) for name, parameter in named if fits(parameter, rank=rank)]
    return LowRank("probe", thin, range(len(thin)), size=1, rank=rank).probe()


def half_bucket(name: str, parameter: nn.Parameter) -> Bucket:
    """Return a bucket of one parameter whose values travel as halves."""
    flat = torch.zeros(parameter.numel(), dtype=parameter.dtype)
    half = HalfCopy(parameter.numel(), [name], rank=0, size=2, exponents={})
    return Bucket("tried", [0], flat, [flat.as_strided(parameter.size(), parameter.stride(), 0)], half, 2)


def trial(parcel: Bucket | LowRank, gradient: Tensor) -> float:
    """Return what a parcel computes for a gradient, in seconds, where nothing is sent."""

    def send(wire: Tensor, name: str) -> list[Any]:
        return []

    def step() -> None:
        parcel.begin()
        parcel.lay_down(0, gradient)
        parcel.start(send)
        parcel.go_on(send, wait)
        parcel.finish(send, wait)

    def wait(handle: Any) -> None:
        """Nothing was sent."""

    return shortest(step)


def plain(gradient: Tensor) -> float:
    """Return the seconds that a gradient takes into its bucket."""
    into = torch.zeros_like(gradient)
    return shortest(lambda: torch.mul(gradient, 0.5, out=into))


def shortest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few times; the first, which brings memory up to speed, does not count."""
    seconds = []
    for _ in range(1 + TIMES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
