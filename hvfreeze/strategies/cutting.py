"""Where a chain is cut for the ranks of a line, as --cut-by says; for every strategy that has lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hvfreeze.chain.segments import Segment, cut_at, cut_evenly, segment_bytes
from hvfreeze.config.strategy import StrategyConfig
from hvfreeze.data.views.transform import seen_shape
from hvfreeze.ranks.agreement import together
from hvfreeze.strategies.strategy import Materials


def example_images(materials: Materials, *, rows: int) -> Tensor:
    """Return black images of a training batch's shape and memory format, (rows, C, H, W)."""
    shape = seen_shape(materials.corpus.train.image_shape, materials.feed.images.transform.image_size)
    return torch.zeros(rows, *shape).contiguous(memory_format=torch.channels_last)


def open_segments(
    materials: Materials,
    settings: StrategyConfig,
    measure: Callable[[], Sequence[float]],
    *,
    depth: int,
    parts: int,
) -> tuple[Segment, ...]:
    """Return at most `parts` segments of the first `depth` blocks, the same on all ranks.

    Collective: every rank of the world must call this.

    Args:
        materials: the run's.
        settings: by which measure segments are alike, or where they begin.
        measure: returns what each block costs in seconds; only rank 0's count.
        depth: blocks that are shared out.
        parts: ranks among which.

    Raises:
        UsageError: --cut-at does not fit.
    """
    by, starts = settings.cut_by or "compute", settings.starts()
    if by == "given":
        return together(materials.world, lambda: cut_at(starts, depth=depth, parts=parts), name="cutting.given")
    return cut_evenly(block_costs(materials, settings, measure)[:depth], parts=parts)


def block_costs(
    materials: Materials, settings: StrategyConfig, measure: Callable[[], Sequence[float]]
) -> Sequence[float]:
    """Return by --cut-by what each block costs, seconds where cuts are given; the same on all ranks.

    Collective: every rank of the world must call this. Of what `measure` returns only rank 0's seconds count.
    """
    world, chain, by = materials.world, materials.chain, settings.cut_by
    depth = len(chain.blocks)
    if by == "params":
        return [float(segment_bytes(chain, (block, block + 1))) for block in range(depth)]
    if by == "count":
        return [1.0] * depth
    # Times differ between ranks and runs; where the cut is changes no bit.
    return world.broadcast_object(list(measure()) if world.rank == 0 else [], name="cutting.seconds")
