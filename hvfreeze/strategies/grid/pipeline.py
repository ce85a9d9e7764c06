"""The pipeline: one rank's part of a step, and its messages to its neighbours.

    partition 0            partition 1          ...   partition P-1
    images -> blocks  ->   blocks   ->                blocks -> loss          activations, micro-batch by micro-batch
              blocks  <-   blocks   <-                blocks <-               gradients, back again

Each micro-batch is kept from its forward to its backward pass. Blocks below the cut have no backward pass: they are a
pure function of their input. Their cached outputs are not sent at all, see cached_rows.py. Source: Awan et al.,
"HyPar-Flow", ISC 2020, arXiv 1911.05146.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.file.format import is_dense
from hvfreeze.comm.agreement import TensorLayout
from hvfreeze.data.batches import Batch
from hvfreeze.optim import Mixture, Objective
from hvfreeze.prefix.features import Halves
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.base import Answers
from hvfreeze.strategies.grid.cached_rows import CachedRows
from hvfreeze.strategies.grid.partitioning import LocalStage
from hvfreeze.strategies.model_parallel import expect, receive
from hvfreeze.strategies.schedules import SCHEDULES, Operation


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the samples of batches, concatenated."""
    ids, views = (np.concatenate(each) for each in zip(*[(batch.ids, batch.views) for batch in batches], strict=True))
    return Batch(ids, views, torch.cat([batch.labels for batch in batches]), sum(batch.counted for batch in batches))


class MicroBatch(NamedTuple):
    """A micro-batch of a step."""

    batch: Batch
    siblings: Sequence[Batch]
    """All micro-batches of its batch in this pipeline."""
    place: int
    """Its index among them."""


class ForwardPass(NamedTuple):
    """A micro-batch between its forward and its backward pass."""

    input: Tensor
    """Input; has the gradient in `grad` after the backward pass if the previous partition trains."""
    output: Tensor
    """Output with gradient; on the last partition the loss, weighted by its share of the step's samples."""


class LineResult(NamedTuple):
    """A step's result on the last partition."""

    loss: float
    """Mean over the pipeline's samples."""
    share: float
    """This pipeline's contribution to the step's loss, which is the mean over all pipelines."""
    answers: Answers


LANES = ("activations", "errors")
EVALUATION = "evaluation.activations"
"""The lane on which evaluation batches are sent."""


@dataclass
class Pipeline:
    """One rank's part in its pipeline."""

    stage: LocalStage
    halves: Halves
    boundaries: Mapping[int, Sequence[TensorLayout]]
    """Layouts by the rows of a batch or micro-batch, then by depth."""
    load: Callable[[Batch], Tensor]
    """Returns the images of a batch, (B, C, H, W); called on the first partition only."""
    rows: CachedRows
    objective: Objective
    clock: PhaseClock
    _micro_batches: list[MicroBatch] = field(default_factory=list)
    """Micro-batches of the current step."""
    _images: Sequence[Tensor] = ()
    """The batch whose micro-batches are in their forward passes."""
    _kept: dict[int, ForwardPass] = field(default_factory=dict)
    _logits: list[Tensor] = field(default_factory=list)
    _loss: float = 0.0
    _total: int = 0
    """Samples of the step, over all pipelines that share its batches."""
    _sequence: int = 0
    """Sequence number of the first current micro-batch."""

    @property
    def is_last(self) -> bool:
        """Whether this rank has the head."""
        return self.stage.mesh.after is None

    @property
    def reads(self) -> bool:
        """Whether this rank reads the cache."""
        return self.rows.depth > 0 and self.stage.mesh.partition == self.rows.reader

    def train(self, batches: Sequence[Batch], *, cut: int) -> LineResult | None:
        """Accumulate a step's gradients with the first `cut` blocks frozen; the last partition has the result.

        Collective among the ranks of the pipeline.
        """
        split = [self.stage.micro_batches(batch) for batch in batches]
        self._micro_batches = [MicroBatch(one, some, place) for some in split for place, one in enumerate(some)]
        total = sum(len(batch.labels) for batch in batches)
        self._total, self._loss, self._logits = total, 0.0, []
        operations = self._operations(cut)
        for operation, coming in zip(operations, [*operations[1:], None]):
            if coming is not None:
                self._expect(coming)
            if operation.kind == "forward":
                self._forward(operation.batch, cut)
            else:
                self._backward(operation.batch, cut)
        self._sequence += len(self._micro_batches)
        self._images = ()
        labels = torch.cat([one.batch.labels for one in self._micro_batches])
        mean = self._loss * (total / (self.stage.lines * len(labels)))
        return LineResult(mean, self._loss, Answers(torch.cat(self._logits), labels)) if self.is_last else None

    def answer(self, batch: Batch) -> Tensor | None:
        """Return the logits of a batch, (B, classes) float32, on the last partition; a rank is at most one batch ahead.

        Collective among the ranks of the pipeline.
        """
        (start, stop), count = self.stage.segment, len(batch.ids)
        cached = self.rows.cached(batch)
        if cached and self.stage.mesh.partition < self.rows.reader:
            return None
        comes = self.stage.mesh.before is not None and not (cached and self.reads)
        came = self._get(start, count, EVALUATION, 0) if comes else None
        if self.reads:
            x, start = self.rows.read(batch, came), self.rows.depth
        else:
            x = self.load(batch) if came is None else came
        x = self.halves.prefix(x, start, stop)
        if self.is_last:
            return x.float()
        self.stage.wire.drain()
        self._put(stop, count, x, EVALUATION, 0)
        return None

    def _operations(self, cut: int) -> list[Operation]:
        """Return this rank's operations: frozen blocks have no backward pass, cached outputs no forward pass."""
        schedule, places = SCHEDULES[self.stage.facts.schedule], self.stage.mesh.partitions
        operations = schedule(self.stage.mesh.partition, places=places, parts=range(len(self._micro_batches)))
        if self.stage.segment[1] > cut:
            return operations
        silent = self.stage.mesh.partition < self.rows.reader
        forwards = [operation for operation in operations if operation.kind == "forward"]
        return [one for one in forwards if not (silent and self.rows.cached(self._micro_batches[one.batch].batch))]

    def _expect(self, operation: Operation) -> None:
        """Receive an operation's input while the previous one runs."""
        depth, lane, source = self._need(operation)
        if source is not None:
            boundary = self.boundaries[len(self._micro_batches[operation.batch].batch.labels)][depth]
            expect(self.stage.wire, boundary, source=source, lane=lane, seq=self._sequence + operation.batch)

    def _need(self, operation: Operation) -> tuple[int, str, int | None]:
        if operation.kind == "forward":
            cached = self.reads and self.rows.cached(self._micro_batches[operation.batch].batch)
            return self.stage.segment[0], "activations", None if cached else self.stage.mesh.before
        return self.stage.segment[1], "errors", self.stage.mesh.after

    def _forward(self, number: int, cut: int) -> None:
        batch, (start, stop) = self._micro_batches[number].batch, self.stage.segment
        x, at = self._input(number)
        with self.clock.within("forward"):
            x = x.requires_grad_(start > cut)
            frozen = max(at, min(stop, cut))
            y = dense(self.halves.prefix(x, at, frozen)) if frozen > at else x
            if frozen < stop:
                y = self.halves.part(y, frozen, stop)
        if self.is_last:
            y = self._weighted_loss(y.float(), batch)
        else:
            self._put(stop, len(batch.labels), y, "activations", self._sequence + number)
        if frozen < stop:
            self._kept[number] = ForwardPass(x, y)

    def _input(self, number: int) -> tuple[Tensor, int]:
        """Return this rank's input for a micro-batch, and the number of blocks it has passed."""
        (batch, siblings, place), start = self._micro_batches[number], self.stage.segment[0]
        comes = self.stage.mesh.before is not None and not (self.reads and self.rows.cached(batch))
        came = self._get(start, len(batch.labels), "activations", self._sequence + number) if comes else None
        if self.reads:
            return self.rows.read(batch, came), self.rows.depth
        if came is not None:
            return came, start
        with self.clock.within("data"):
            if self.rows.depth > 0:
                # Load only this micro-batch: cached ones need no images.
                return self.load(batch), start
            if place == 0:
                self._images = self.load(joined(siblings)).split([len(each.labels) for each in siblings])
        return self._images[place].detach(), start

    def _weighted_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        # The loss is averaged over pipelines, and those of a replica share its batches.
        share = len(batch.labels) * self.stage.lines / self._total
        loss = self.objective.loss(logits, Mixture(logits, batch.labels, batch.ids)) * share
        self._loss += loss.item()
        self._logits.append(logits.detach())
        return loss

    def _backward(self, number: int, cut: int) -> None:
        start, stop = self.stage.segment
        rows, kept = len(self._micro_batches[number].batch.labels), self._kept.pop(number)
        error = None if self.is_last else self._get(stop, rows, "errors", self._sequence + number)
        with self.clock.within("backward"):
            # Blocks behind the cut may have no parameters, or only ones that the user has frozen.
            if kept.output.requires_grad:
                kept.output.backward(error)
        if start > cut and self.stage.mesh.before is not None:
            assert kept.input.grad is not None, "every block must use its input"
            self._put(start, rows, kept.input.grad, "errors", self._sequence + number)

    def _put(self, depth: int, rows: int, tensor: Tensor, lane: str, seq: int) -> None:
        to = self.stage.mesh.before if lane == "errors" else self.stage.mesh.after
        assert to is not None, "a rank sends to its neighbours only"
        self.stage.wire.put(self.boundaries[rows][depth].flat(tensor.detach()), to=to, lane=lane, seq=seq)

    def _get(self, depth: int, rows: int, lane: str, seq: int) -> Tensor:
        source = self.stage.mesh.after if lane == "errors" else self.stage.mesh.before
        assert source is not None, "a rank receives from its neighbours only"
        with self.clock.within("allreduce"):
            return receive(self.stage.wire, self.boundaries[rows][depth], source=source, lane=lane, seq=seq)


def dense(x: Tensor) -> Tensor:
    """Return `x` as it would come from the cache, which stores dense tensors only."""
    return x if is_dense(x.shape, x.stride()) else x.contiguous()
