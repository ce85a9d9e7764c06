"""Which of a cut's gradients travel how: in which groups and buckets, for each compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from hvfreeze.config.rules import parse_compression
from hvfreeze.ranks.exchange.buckets import Bucket, lay_out_buckets, runs_of
from hvfreeze.ranks.exchange.halves import HalfCopy
from hvfreeze.ranks.exchange.low_rank.parcel import LowRank, fits, matrix_shape
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
    thin, whole = thin_and_whole(named, compression)
    half = partial(HalfCopy, rank=world.rank, size=world.size, exponents=exponents) if kind == "fp16" else None
    groups = lay_out_low_rank(named, thin, size=world.size, rank=rank, group_bytes=bucket_bytes)
    return groups, lay_out_buckets(named, whole, size=world.size, bucket_bytes=bucket_bytes, half=half)


def thin_and_whole(named: Sequence[tuple[str, nn.Parameter]], compression: str) -> tuple[list[int], list[int]]:
    """Return the slots of the parameters that travel as matrices of low rank, and all others."""
    kind, rank = parse_compression(compression)
    thin = [slot for slot, (_, one) in enumerate(named) if kind == "powersgd" and fits(one, rank=rank)]
    return thin, sorted(set(range(len(named))) - set(thin))


def groups_of(named: Sequence[tuple[str, nn.Parameter]], slots: Sequence[int], *, group_bytes: int) -> list[list[int]]:
    """Return groups of `slots` of at least `group_bytes` of gradients, the last first; it depends on them alone.

    What is left at the end is a smaller group.
    """
    groups: list[list[int]] = [[]]
    for slot in reversed(slots):
        if sum(named[one][1].nbytes for one in groups[-1]) >= group_bytes:
            groups.append([])
        groups[-1].append(slot)
    return [group for group in groups if group]


def lay_out_low_rank(
    named: Sequence[tuple[str, nn.Parameter]], slots: Sequence[int], *, size: int, rank: int, group_bytes: int
) -> list[LowRank]:
    """Return the parameters at `slots`, in the groups of `groups_of`."""
    return [
        LowRank(f"gradients.low-rank.{number}", [named[slot] for slot in group], group, size=size, rank=rank)
        for number, group in enumerate(groups_of(named, slots, group_bytes=group_bytes))
    ]


@dataclass(frozen=True)
class Message:
    """What is summed at once, and what is summed when that has arrived."""

    slots: Sequence[int]
    first_bytes: int
    second_bytes: int = 0


def messages_of(
    named: Sequence[tuple[str, nn.Parameter]], *, compression: str, size: int, bucket_bytes: int
) -> list[Message]:
    """Return what a rank hands over in a step, in order: the bytes that `lay_out` makes, without its buffers."""
    kind, rank = parse_compression(compression)
    thin, whole = thin_and_whole(named, compression)
    messages = []
    for group in groups_of(named, thin, group_bytes=bucket_bytes):
        shapes = [matrix_shape(named[slot][1]) for slot in group]
        messages.append(Message(group, *(4 * rank * sum(side) for side in zip(*shapes, strict=True))))
    for run in runs_of(named, whole, bucket_bytes=bucket_bytes):
        full = sum(named[slot][1].nbytes for slot in run)
        elements = sum(named[slot][1].numel() for slot in run)
        messages.append(Message(run, 2 * (elements + size) if kind == "fp16" else full))
    return messages
