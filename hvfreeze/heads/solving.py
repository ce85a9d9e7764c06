"""A run's head solved: from batches to the layer that fits all ranks' features of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hvfreeze.data.batches import Batch
from hvfreeze.heads.kernel.fit import KernelFit, fit_kernel
from hvfreeze.heads.kernel.module import KernelHead
from hvfreeze.heads.linear.fit import HeadFit, fit_softmax
from hvfreeze.heads.multilevel import SolvableHead, take
from hvfreeze.heads.rows import Rows, RowsOfBatches, fits, gather
from hvfreeze.heads.solution import Solution
from hvfreeze.ranks.machine.share import memory_budget
from hvfreeze.ranks.world import World

USUAL_PASSES, COMPARING_PASSES = 40, 5
"""Over the rows, until a linear head is solved, and until rows have become the points that are compared."""

Count = Callable[[Tensor, Tensor, float], None]


def rows_of(
    batches: Sequence[Batch],
    layer: SolvableHead,
    *,
    fetch: Callable[[Batch], Tensor],
    expect: Callable[[Sequence[Batch]], None],
    held_out: NDArray[np.bool_],
    memory_bytes: int,
) -> Rows:
    """Return the rows that `layer` is fitted to; see `RowsOfBatches`."""
    return RowsOfBatches(
        batches, fetch, expect=expect, width=layer.in_features, held_out=held_out, memory_bytes=memory_bytes
    )


def solve(
    rows: Rows,
    layer: SolvableHead,
    *,
    world: World,
    judged: bool,
    stop: Callable[[int], bool],
    count: Count,
) -> Solution | None:
    """Fit `layer` to the rows of all ranks; return None, and leave it as it is, where some rank wants to stop before.

    Collective: every rank of `world` must call this.

    Args:
        rows: this rank's.
        layer: becomes the solution, the same on every rank.
        world: the ranks.
        judged: whether held-out rows are to say how good the solution is, and not only which penalty is.
        stop: told after every few batches how many rows have their features, and 0 in every pass of the solution; true
            on some rank ends it all.
        count: told at the end the logits, (B, classes), labels and mean loss of every batch.

    Raises:
        NumericsError: a feature is not finite; on all ranks.
        UsageError: there are no samples to fit on, none to choose by, or too many to be compared; on all ranks.
    """
    if gather(rows, world=world, stop=stop):
        return None
    fit: HeadFit | KernelFit | None
    classes, asked = layer.out_features, partial(stop, 0)
    if isinstance(layer, KernelHead):
        # Half of what is available beside the rows: to compute lines anew takes ten times as long as to use them.
        memory = memory_budget(world.local_size) * 3 // 2
        fit = fit_kernel(rows, classes=classes, world=world, memory_bytes=memory, judged=judged, stop=asked)
    else:
        fit = fit_softmax(rows, classes=classes, world=world, stop=asked)
    if fit is None:
        return None
    take(layer, fit)
    done = 0
    for chunk in rows.chunks():
        with torch.no_grad():
            # To compare all rows once more would take as long as to find the head.
            known = fit.answers[done : done + len(chunk.labels)] if isinstance(fit, KernelFit) else None
            logits = layer(chunk.features.float()) if known is None else known
        done += len(chunk.labels)
        count(logits, chunk.labels, float(functional.cross_entropy(logits, chunk.labels)))
    return fit


def times_asked_for(batches: Sequence[Batch], layer: SolvableHead, *, memory_bytes: int) -> int:
    """Return how often a row is asked for while a head is solved: once where rows are kept in memory."""
    rows = sum(batch.counted for batch in batches)
    if fits(rows, layer.in_features, memory_bytes):
        return 1
    return COMPARING_PASSES if isinstance(layer, KernelHead) else USUAL_PASSES
