"""Fit a run's head: from batches to the layer, over all ranks."""

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
"""Passes over the rows for fitting a linear head, and for projecting rows of a kernel head."""


@dataclass(frozen=True, eq=False)
class FitTerms:
    """The settings of a fit."""

    held_out: NDArray[np.bool_]
    """Mask of the sample ids that choose the penalty, (samples,)."""
    trained: bool
    """Whether the network was trained on the other samples."""
    sampled: int | None
    """Number of this rank's first batches that determine a kernel head's projection; None if all rows may be stored."""


def solver_memory(local_size: int) -> int:
    """Return the bytes of a rank for a solver: half of the available memory, divided by the ranks of the node.

    Memory pays off: recomputing kernel values takes ten times as long as reading them.
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
    """Fit `layer` to the rows of all ranks; None if a rank stops the fit, which leaves the layer unchanged. Collective.

    Args:
        rows: this rank's rows.
        layer: the layer to fit, the same on every rank.
        task: task of the head.
        terms: settings of the fit, which `rows` already reflect.
        world: the ranks.
        centres: number of centres of a kernel head; None chooses.
        stop: called after every few batches with the number of rows with features, and often with 0 and the progress
            during the fit; True on any rank stops the fit.
        count: called at the end with the logits, (B, classes), the labels and the mean loss of every batch.

    Raises:
        NumericsError: a feature is NaN or Inf; on all ranks.
        UsageError: there are no samples to fit, or none to choose a penalty; on all ranks.
    """
    fit: HeadFit | KernelFit | None
    asked: Any = {"task": task, "world": world, "trained": terms.trained}
    if isinstance(layer, KernelHead):
        # The solver may use the memory that training has freed on all ranks of the node.
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
        # Computing all outputs again would take as long as a pass of the solver.
        for logits, labels in zip(fit.answers.split(CHUNK_ROWS), fit.labels.split(CHUNK_ROWS)):
            if len(labels):
                count(logits, labels, float(task.losses(logits, labels).mean()))
        solution = fit.numbers()
        # The Gram matrix is freed; later allocations could not reuse its memory otherwise.
        del fit
        give_back()
        return solution
    for chunk in SomeRows(rows, fit.used).chunks():
        with torch.no_grad():
            logits = layer(chunk.features.float())
        count(logits, chunk.info.labels, float(task.losses(logits, chunk.info.labels).mean()))
    return fit.numbers()


def times_asked_for(batches: Sequence[Batch], layer: SolvableHead, *, memory_bytes: int) -> int:
    """Return the number of times that a fit reads each row: once if rows are stored in memory."""
    rows = sum(batch.counted for batch in batches)
    if fits(rows, layer.in_features, memory_bytes):
        return 1
    return PROJECTION_PASSES if isinstance(layer, KernelHead) else LINEAR_PASSES
