"""Which of a cut's gradients travel how: in which groups and buckets, for each compression."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from hvfreeze.config.rules import parse_compression
from hvfreeze.ranks.exchange.buckets import Bucket, lay_out_buckets
from hvfreeze.ranks.exchange.halves import HalfCopy
from hvfreeze.ranks.exchange.low_rank import LowRank, fits, lay_out_low_rank
from hvfreeze.ranks.world import World


def lay_out(
    named: Sequence[tuple[str, nn.Parameter]],
    *,
    compression: str,
    world: World,
    bucket_bytes: int,
    exponents: dict[str, int],
) -> tuple[list[LowRank], list[Bucket]]:
    """Return the groups of matrices of low rank and the buckets, in which every parameter has one place.

    The layout depends on the parameters and the compression alone.

    Args:
        named: what is carried.
        compression: none, fp16 or powersgd:R.
        world: the ranks that gradients are averaged over.
        bucket_bytes: of gradients that travel together, about.
        exponents: see `HalfCopy`.
    """
    kind, rank = parse_compression(compression)
    slots = range(len(named))
    thin = [slot for slot in slots if kind == "powersgd" and fits(named[slot][1], rank=rank)]
    whole = sorted(set(slots) - set(thin))
    half = partial(HalfCopy, rank=world.rank, size=world.size, exponents=exponents) if kind == "fp16" else None
    groups = lay_out_low_rank(named, thin, size=world.size, rank=rank, group_bytes=bucket_bytes)
    return groups, lay_out_buckets(named, whole, size=world.size, bucket_bytes=bucket_bytes, half=half)
