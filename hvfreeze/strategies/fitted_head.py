"""Fits the head, by kernel ridge, logistic or linear regression, instead of training it: no steps, no votes.

frozen blocks (cached or computed) -> features of all ranks -> ridge or logistic regression -> one head on all ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.comm.resources import memory_budget
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch
from hvfreeze.freezing.frozen_prefix import hold_still
from hvfreeze.heads.kernel import KernelHead
from hvfreeze.heads.multilevel import head_of
from hvfreeze.heads.rows import RowsOfBatches
from hvfreeze.heads.solution import Solution, Stop
from hvfreeze.heads.solve import FitTerms, solve, times_asked_for
from hvfreeze.prefix.cache_decision import Horizon
from hvfreeze.prefix.features import Halves
from hvfreeze.runs.reading import Move
from hvfreeze.strategies.base import BuildContext, State
from hvfreeze.strategies.build_parts import cost_inputs, open_both_features
from hvfreeze.strategies.whole_replicas import WholeReplicas
from hvfreeze.tasks import Task

CUT = 1
"""The chain has two blocks: the features and the head."""


def open_fitted_head(context: BuildContext, config: Config) -> FittedHead:
    """Return the features and the head of a `solvable_chain`. Collective."""
    world = context.world
    # Every row serves one epoch, and the cut never moves.
    costs = cost_inputs(context, config.cache, lambda: Horizon(1.0, math.inf), size=world.size)
    hold_still(context.chain, CUT)
    halves, passes = Halves(context.chain, config.optimizer.precision), passes_to_fit(context, costs.memory_bytes)
    training, evaluation = open_both_features(context, config, halves, costs, world=world, passes=passes)
    task, labels = context.corpus.task, context.corpus.train.labels
    weights = task.weights_of(labels, torch.arange(len(labels))).numpy()
    return FittedHead(
        world=world,
        halves=halves,
        training=training,
        evaluation=evaluation,
        clock=context.clock,
        centres=config.head.centres,
        task=task,
        weights=weights,
    )


def passes_to_fit(context: BuildContext, memory_bytes: int) -> float:
    """Return the number of passes over all samples that fitting the head takes."""
    layer, (few, others) = head_of(context.chain), context.feed.sampled_views()
    views = max(1, context.feed.images.transform.augment.num_views)
    if few is not None and isinstance(layer, KernelHead):
        return float(views)
    return float(views * times_asked_for([*(few or ()), *others], layer, memory_bytes=memory_bytes))


@dataclass(eq=False, kw_only=True)
class FittedHead(WholeReplicas):
    """Frozen features and a fitted head, equal on all ranks; see `OpenModel`."""

    cut: ClassVar[int] = CUT
    centres: int | None
    """Number of centres of a kernel head; None lets the fit choose."""
    task: Task
    """Task of the head."""
    weights: NDArray[np.float32]
    """Weight of each training sample, (samples,) float32."""
    _exchanged_bytes: int = 0
    _summary: dict[str, Any] = field(default_factory=dict)

    def fit(
        self,
        batches: Sequence[Batch],
        terms: FitTerms,
        *,
        stop: Stop,
        count: Callable[[Tensor, Tensor, float], None],
    ) -> Solution | None:
        """Fit the head to the features of all ranks' batches; return None if some rank stops it. Collective.

        `batches` are this replica's, each sample and view once; there may be none. For other arguments and errors see
        `hvfreeze.heads.solve.solve`.
        """
        self.begin_epoch(batches)
        layer = head_of(self.chain)
        rows = RowsOfBatches(
            batches,
            self.training.of,
            expect=self.training.expect,
            width=layer.in_features,
            held_out=terms.held_out,
            memory_bytes=memory_budget(self.world.local_size),
            weights=self.weights,
            sampled=terms.sampled if isinstance(layer, KernelHead) else None,
        )
        with self.clock.within("optimizer"):
            found = solve(
                rows,
                layer,
                self.task,
                terms,
                world=self.world,
                centres=self.centres,
                stop=stop,
                count=count,
            )
        if found is not None:
            self._exchanged_bytes += found.exchanged_bytes
            self._summary = {"head": found.summary()}
        return found

    def settle(self) -> None:
        """Do nothing: every rank has the same features and the same head."""

    def state_dict(self) -> State:
        """Return the model, which is equal on all ranks."""
        return State({**self._model_state(), "summary": self._summary, "bytes": self._exchanged_bytes}, {})

    def load_state_dict(self, state: State) -> None:
        """Load a state of the same rank."""
        self._began = False
        self._load_model(state.shared)
        self._summary, self._exchanged_bytes = state.shared["summary"], state.shared["bytes"]

    def repartitioned(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield an empty state for each rank: ranks have no own state. Not a collective."""
        for _ in owns:
            pass
        yield from ({} for _ in range(size))

    def report(self) -> dict[str, Any]:
        """Return the exchanged bytes, the cache's numbers, and the head's numbers. Collective."""
        return {
            "allreduce_bytes": self._exchanged_bytes,
            "other_collective_bytes": 0,
            "cut_history": [Move(0, 0, self.cut)],
            "cache": self.training.report(),
            **self._summary,
        }

    def _cuts(self) -> Sequence[int]:
        return [CUT]
