"""A chain cut into segments, one for each rank of a line: where, and by which measure.

costs = work_of(chain, images)                             # one number a block
cut_evenly(costs, parts=3)                                 # ((0, 3), (3, 4), (4, 5))
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation
from hvfreeze.wording import plural

Segment = tuple[int, int]
"""Blocks lo..hi-1."""
RunBlocks = Callable[[Tensor, int, int], Tensor]
"""(x, start, stop) -> output of blocks start..stop-1."""
TIMES = 3
"""A block is timed, of which the least counts."""


def block_seconds(run: RunBlocks, images: Tensor, *, depth: int) -> list[float]:
    """Return the least time in seconds that each of the first `depth` blocks took for a batch of `images`."""
    least = [math.inf] * depth
    for _ in range(TIMES):
        x = images
        for block in range(depth):
            start = time.perf_counter()
            x = run(x, block, block + 1)
            least[block] = min(least[block], time.perf_counter() - start)
    return least


@contextmanager
def operations_counted() -> Iterator[FlopCounterMode]:
    """Count floating-point operations: products of matrices, those of attention too, and convolutions."""
    fused = torch.backends.mha.get_fastpath_enabled()
    # The counter sees no product inside a fused kernel.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@torch.no_grad()
def work_of(chain: Chain, images: Tensor) -> list[int]:
    """Return the floating-point operations of each block's forward pass for `images`, (B, C, H, W).

    Counted, not clocked: equal on all machines, so that a plan made from it is. The chain's running statistics and
    modes stay as they are.
    """
    work, x = [], images
    with in_evaluation(chain.model):
        for block in chain.blocks:
            with operations_counted() as counter:
                x = block(x)
            work.append(counter.get_total_flops())
    return work


def tensors_of(chain: Chain, segment: Segment) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a segment's blocks."""
    return [*chain.named_parameters(*segment), *chain.named_buffers(*segment)]


def segment_bytes(chain: Chain, segment: Segment) -> int:
    """Return the bytes of a segment's parameters and buffers."""
    return sum(tensor.nbytes for _, tensor in tensors_of(chain, segment))


def drop_tensors(chain: Chain, start: int, stop: int) -> None:
    """Free the memory of blocks start..stop-1, which run elsewhere; their tensors stay, empty."""
    for _, tensor in tensors_of(chain, (start, stop)):
        tensor.data = torch.empty(0, dtype=tensor.dtype)


def cut_evenly(costs: Sequence[float], *, parts: int) -> tuple[Segment, ...]:
    """Return at most `parts` segments of at least one block, of which the dearest costs as little as can be.

    Of several ways the one with the shortest last segments is taken, so that equal costs give equal cuts everywhere.
    """
    blocks, parts = len(costs), min(parts, len(costs))
    # least[p][n]: what the dearest of p segments of the first n blocks costs, and where the last of them begins.
    least = [[(math.inf, 0)] * (blocks + 1) for _ in range(parts + 1)]
    least[0][0] = (0.0, 0)
    for part in range(1, parts + 1):
        for stop in range(part, blocks + 1):
            choices = [(max(least[part - 1][s][0], sum(costs[s:stop])), -s) for s in range(part - 1, stop)]
            cost, start = min(choices)
            least[part][stop] = (cost, -start)
    segments: list[Segment] = []
    stop = blocks
    for part in range(parts, 0, -1):
        start = least[part][stop][1]
        segments.insert(0, (start, stop))
        stop = start
    return tuple(segments)


def cut_at(
    starts: Sequence[int], *, depth: int, parts: int, first: int = 0, fewer: bool = False
) -> tuple[Segment, ...]:
    """Return the segments of blocks first..depth-1 that begin at `first` and at each of `starts`.

    Raises UsageError where these are not ascending, or do not make `parts` segments, at most so many with `fewer`.
    """
    bounds = [first, *starts, depth]
    number_fits = len(starts) < parts if fewer else len(starts) == parts - 1
    if not number_fits or any(a >= b for a, b in pairwise(bounds)):
        shown, most = ",".join(map(str, starts)), "at most " if fewer else ""
        above = f", above --cut ({first})" if first else ""
        raise UsageError(
            f"--cut-at ({shown}) must be {most}{plural(parts - 1, 'number')} in {first + 1}..{depth - 1}{above}, "
            f"ascending: the blocks at which parts begin, but for the first of {most}{parts}"
        )
    return tuple(pairwise(bounds))
