"""A run's head solved: from batches to the layer that fits all ranks' features of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.allocator import give_back
from hvfreeze.comm.resources import memory_budget
from hvfreeze.comm.world import World
from hvfreeze.data.batches import Batch
from hvfreeze.heads.kernel import KernelFit, KernelHead, fit_kernel
from hvfreeze.heads.linear import HeadFit, fit_linear
from hvfreeze.heads.multilevel import SolvableHead, take
from hvfreeze.heads.rows import CHUNK_ROWS, SomeRows, WholeRows, fits, gather
from hvfreeze.heads.solution import Solution, Stop
from hvfreeze.tasks import Task

LINEAR_PASSES, PROJECTION_PASSES = 40, 5
"""Over the rows, to fit a linear head, and to project rows for a kernel head."""


@dataclass(frozen=True, eq=False)
class FitTerms:
    """On what terms a head is fitted."""

    held_out: NDArray[np.bool_]
    """(samples,) for each sample id whether it chooses the penalty."""
    trained: bool
    """Whether the network was trained on the other samples."""
    sampled: int | None
    """How many of this rank's batches, the first ones, a kernel head looks at first; None where all may be kept."""


def solver_memory(local_size: int) -> int:
    """Return the bytes that one of so many ranks of a node may take for a solver: half of what is available, shared.

    To recompute kernel values takes ten times as long as to read them.
    """
    return memory_budget(local_size) * 3 // 2


def solve(
    rows: WholeRows,
    layer: SolvableHead,
    task: Task,
    terms: FitTerms,
    *,
    world: World,
    centres: int | None,
    stop: Stop,
    count: Callable[[Tensor, Tensor, float], None],
) -> Solution | None:
    """Fit `layer` to the rows of all ranks, or return None and leave it where some rank wants to stop. Collective.

    Args:
        rows: this rank's.
        layer: becomes the solution, the same on every rank.
        task: what the head answers.
        terms: by which the rows are marked already.
        world: the ranks.
        centres: that a kernel head compares rows with; None chooses.
        stop: called after every few batches with the number of rows that have their features, and with 0, often, while
            the solution is computed, then perhaps with how far it is; true on some rank ends it all.
        count: called at the end with the logits, (B, classes), labels and mean loss of every batch.

    Raises:
        NumericsError: a feature is not finite; on all ranks.
        UsageError: there are no samples to fit on, or none to choose by; on all ranks.
    """
    fit: HeadFit | KernelFit | None
    asked: Any = {"task": task, "world": world, "trained": terms.trained}
    if isinstance(layer, KernelHead):
        # What training has freed on all ranks of the node is the solver's to take.
        give_back()
        world.barrier(name="head.memory")
        asked |= {"centres": centres, "memory_bytes": solver_memory(world.local_size)}
        fit = fit_kernel(rows, read=stop, watch=partial(stop, 0), **asked)
    elif gather(rows, world=world, stop=stop):
        return None
    else:
        fit = fit_linear(rows, stop=partial(stop, 0), **asked)
    if fit is None:
        return None
    take(layer, fit)
    if isinstance(fit, KernelFit):
        # To compute all answers once more would take as long as a pass of the solver.
        for logits, labels in zip(fit.answers.split(CHUNK_ROWS), fit.labels.split(CHUNK_ROWS)):
            if len(labels):
                count(logits, labels, float(task.losses(logits, labels).mean()))
        solution = fit.numbers()
        # The Gram matrix is gone; what comes next would lie beside the memory that it had.
        del fit
        give_back()
        return solution
    for chunk in SomeRows(rows, fit.used).chunks():
        with torch.no_grad():
            logits = layer(chunk.features.float())
        count(logits, chunk.info.labels, float(task.losses(logits, chunk.info.labels).mean()))
    return fit.numbers()


def times_asked_for(batches: Sequence[Batch], layer: SolvableHead, *, memory_bytes: int) -> int:
    """Return how often a row is asked for while a head is solved: once where rows are kept in memory."""
    rows = sum(batch.counted for batch in batches)
    if fits(rows, layer.in_features, memory_bytes):
        return 1
    return PROJECTION_PASSES if isinstance(layer, KernelHead) else LINEAR_PASSES
