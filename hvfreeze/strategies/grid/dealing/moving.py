"""Blocks sent to the ranks that are to train them, with all that their training has led to."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.segments import Segment, tensors_of
from hvfreeze.plain_load import load_plain
from hvfreeze.ranks.wire import Wire
from hvfreeze.strategies.grid.dealing.deal import transfers

MOVING = "blocks"
"""The lane."""
BY_NAME = ("tensors", "optimizer", "exponents")
"""What a block has, each by the names of its tensors."""
Belongings = dict[str, dict[str, Any]]


def belongings_of(state: Mapping[str, Any]) -> Belongings:
    """Return what `state_of` says of single tensors."""
    return {"tensors": state["tensors"], "optimizer": state["optimizer"], "exponents": state["reducer"]["exponents"]}


def move(
    wire: Wire,
    chain: Chain,
    mine: Belongings,
    *,
    place: int,
    ranks: Sequence[int],
    before: Sequence[Segment],
    after: Sequence[Segment],
) -> Belongings:
    """Return what belongs to the blocks that this rank is to hold, bit for bit: its own, and what others send.

    Collective among `ranks`, all of whom must call this.

    Args:
        wire: with the lane `MOVING`.
        chain: whose blocks they are.
        mine: what this rank holds.
        place: of this rank among `ranks`.
        ranks: that hold the chain, once or more, and will.
        before: by place, the blocks that each holds.
        after: the same of what each is to hold.
    """
    blocks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for block, source, to in transfers(before, after):
        blocks[source, to].append(block)
    for (source, to), some in blocks.items():
        if source == place:
            data = packed(of_blocks(mine, chain, some))
            wire.put(torch.tensor([len(data)]), to=ranks[to], lane=MOVING, seq=0)
            wire.put(data, to=ranks[to], lane=MOVING, seq=1)
    result = of_blocks(mine, chain, [block for block in range(*after[place]) if block in range(*before[place])])
    for source in [source for source, to in blocks if to == place]:
        length = int(wire.get((1,), dtype=torch.int64, source=ranks[source], lane=MOVING, seq=0))
        data = wire.get((length,), dtype=torch.uint8, source=ranks[source], lane=MOVING, seq=1)
        for kind, found in load_plain(io.BytesIO(data.numpy().tobytes())).items():
            result[kind] |= found
    wire.drain()
    return result


def of_blocks(belongings: Belongings, chain: Chain, blocks: Sequence[int]) -> Belongings:
    """Return what belongs to some blocks."""
    names = [name for block in blocks for name, _ in tensors_of(chain, (block, block + 1))]
    return {kind: {name: belongings[kind][name] for name in names if name in belongings[kind]} for kind in BY_NAME}


def packed(belongings: Belongings) -> Tensor:
    """Return them as uint8 [length]; strides are kept."""
    buffer = io.BytesIO()
    torch.save(belongings, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
