"""Cut a chain into segments, one per rank of a pipeline, by the cost of its blocks.

costs = work_of(chain, images)                             # one number per block
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
"""A segment of blocks lo..hi-1, as (lo, hi)."""
RunBlocks = Callable[[Tensor, int, int], Tensor]
"""Function of (x, start, stop) that returns the output of blocks start..stop-1."""
FORWARD_SHARE = 1 / 3
"""Share of the forward pass in a block's training step, because a backward pass takes twice as long."""


def block_seconds(run: RunBlocks, images: Tensor, *, depth: int) -> list[float]:
    """Time the first `depth` blocks for a batch of `images`, three times; return the least seconds of each."""
    least = [math.inf] * depth
    for _ in range(3):
        x = images
        for block in range(depth):
            start = time.perf_counter()
            x = run(x, block, block + 1)
            least[block] = min(least[block], time.perf_counter() - start)
    return least


@contextmanager
def operations_counted() -> Iterator[FlopCounterMode]:
    """Count floating-point operations of matrix products, attention and convolutions."""
    fused = torch.backends.mha.get_fastpath_enabled()
    # The counter does not see products inside fused kernels.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@torch.no_grad()
def work_of(chain: Chain, images: Tensor) -> list[int]:
    """Count the floating-point operations of each block's forward pass for `images`, (B, C, H, W).

    Counts are equal on all machines, unlike times, and so are plans based on them. Running statistics and modes are
    unchanged.
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
    """Return the size of a segment's parameters and buffers in bytes."""
    return sum(tensor.nbytes for _, tensor in tensors_of(chain, segment))


def drop_tensors(chain: Chain, start: int, stop: int) -> None:
    """Free the memory of blocks start..stop-1, which run on other ranks, by emptying their tensors."""
    for _, tensor in tensors_of(chain, (start, stop)):
        tensor.data = torch.empty(0, dtype=tensor.dtype)


def cut_evenly(costs: Sequence[float], *, parts: int) -> tuple[Segment, ...]:
    """Cut blocks into at most `parts` segments with the least cost of the most expensive one.

    Ties are broken by the shortest last segments, so that equal costs give equal cuts on all ranks.
    """
    blocks, parts = len(costs), min(parts, len(costs))
    # least[p][n]: cost of the most expensive of p segments of the first n blocks, and the start of the last one.
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

    Raises:
        UsageError: `starts` are not ascending, or do not make `parts` segments; with `fewer`, at most `parts`.
    """
    bounds = [first, *starts, depth]
    number_fits = len(starts) < parts if fewer else len(starts) == parts - 1
    if not number_fits or any(a >= b for a, b in pairwise(bounds)):
        shown, most = ",".join(map(str, starts)), "at most " if fewer else ""
        above = f", above --cut ({first})" if first else ""
        raise UsageError(
            f"--cut-at ({shown}) must be {most}{plural(parts - 1, 'number')} in {first + 1}..{depth - 1}{above}, "
            f"ascending: the first blocks of all parts but the first of {most}{parts}"
        )
    return tuple(pairwise(bounds))
