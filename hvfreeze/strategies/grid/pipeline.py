"""The pipeline: what one rank does of a step, and what it sends to its neighbours in the line.

    partition 0            partition 1          ...   partition P-1
    images -> blocks  ->   blocks   ->                blocks -> loss          activations, micro-batch by micro-batch
              blocks  <-   blocks   <-                blocks <-               errors, back again

Each micro-batch is kept from its forward to its backward pass. Below the cut nothing comes back: blocks there are a
pure function of their input. Source: Awan et al., "HyPar-Flow", ISC 2020, arXiv 1911.05146.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hvfreeze.chain.segments import Boundary, Segment
from hvfreeze.data.batches import Batch
from hvfreeze.prefix.features import Halves
from hvfreeze.ranks.mesh import Mesh
from hvfreeze.ranks.wire import Wire
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.schedules import SCHEDULES, Operation
from hvfreeze.strategies.strategy import Answers
from hvfreeze.updates.objective import Mixture, Objective

LANES = ("activations", "errors")
EVALUATION = "evaluation.activations"
"""The lane on which evaluation batches travel."""


class Part(NamedTuple):
    """A micro-batch."""

    batch: Batch
    """What it is a part of."""
    place: int
    """Which part."""
    labels: Tensor
    """(rows,) int64."""


class Kept(NamedTuple):
    """A micro-batch between its forward and its backward pass."""

    input: Tensor
    """With the error in `grad` after the backward pass, where the partition before trains."""
    output: Tensor
    """With gradient; on the last partition the loss, weighted by its share of the step's samples."""


class Learnt(NamedTuple):
    """What the last partition knows after a step."""

    loss: float
    """The mean over the step's samples."""
    answers: Answers


@dataclass(frozen=True)
class Plan:
    """Who runs which blocks, and how a batch goes through them; the same on all ranks."""

    segments: tuple[Segment, ...]
    """By partition."""
    micro_batches: int
    schedule: str
    """One of `SCHEDULES`."""

    def bytes_per_step(self, boundaries: Sequence[Boundary], *, cut: int) -> dict[str, int]:
        """Return what the ranks of one line send for a batch, whose boundaries these are, by lane."""
        inner = [start for start, _ in self.segments[1:]]
        return {
            "activations": sum(boundaries[depth].num_bytes for depth in inner),
            "errors": sum(boundaries[depth].num_bytes for depth in inner if depth > cut),
        }


@dataclass
class Pipeline:
    """One rank's part in its line."""

    plan: Plan
    mesh: Mesh
    halves: Halves
    wire: Wire
    boundaries: Mapping[int, Sequence[Boundary]]
    """By the rows of a batch or micro-batch, and then by depth."""
    load: Callable[[Batch], Tensor]
    """Returns the images of a batch, (B, C, H, W); asked of the first partition alone."""
    objective: Objective
    clock: PhaseClock
    _parts: list[Part] = field(default_factory=list)
    """Of the step under way."""
    _images: Sequence[Tensor] = ()
    """Of the batch whose parts go forward."""
    _kept: dict[int, Kept] = field(default_factory=dict)
    _logits: list[Tensor] = field(default_factory=list)
    _loss: float = 0.0
    _sequence: int = 0
    """Of the first micro-batch under way."""

    @property
    def segment(self) -> Segment:
        """The blocks that this rank runs."""
        return self.plan.segments[self.mesh.partition]

    @property
    def is_last(self) -> bool:
        """Whether this rank has the head."""
        return self.mesh.after is None

    def train(self, batches: Sequence[Batch], *, cut: int) -> Learnt | None:
        """Add the gradients of a step's batches to those of this rank's blocks, of which the first `cut` are frozen.

        The last partition returns what it learnt. Collective among the ranks of the line.
        """
        split = [(batch, batch.labels.tensor_split(self.plan.micro_batches)) for batch in batches]
        self._parts = [Part(batch, place, some) for batch, parts in split for place, some in enumerate(parts)]
        self._loss, self._logits = 0.0, []
        operations = self._operations(cut)
        for operation, coming in zip(operations, [*operations[1:], None]):
            if coming is not None:
                self._expect(coming)
            if operation.kind == "forward":
                self._forward(operation.batch, cut)
            else:
                self._backward(operation.batch, cut)
        self._sequence += len(self._parts)
        self._images = ()
        labels = torch.cat([batch.labels for batch in batches])
        return Learnt(self._loss, Answers(torch.cat(self._logits), labels)) if self.is_last else None

    def answer(self, batch: Batch) -> Tensor | None:
        """Return on the last partition the logits of a batch, (B, classes) float32.

        Collective among the ranks of the line. A rank is at most a batch ahead of the next.
        """
        start, stop = self.segment
        rows = len(batch.ids)
        x = self.load(batch) if self.mesh.before is None else self._get(start, rows, EVALUATION, 0)
        x = self.halves.prefix(x, start, stop)
        if self.is_last:
            return x.float()
        self.wire.drain()
        self._put(stop, rows, x, EVALUATION, 0)
        return None

    def _operations(self, cut: int) -> list[Operation]:
        """Return what this rank does in a step; what is frozen has no backward pass."""
        schedule, places = SCHEDULES[self.plan.schedule], self.mesh.partitions
        operations = schedule(self.mesh.partition, places=places, parts=range(len(self._parts)))
        return [operation for operation in operations if operation.kind == "forward" or self.segment[1] > cut]

    def _expect(self, operation: Operation) -> None:
        """Let what an operation needs arrive while the one before it is done."""
        depth, lane, source = self._need(operation)
        if source is not None:
            boundary = self.boundaries[len(self._parts[operation.batch].labels)][depth]
            shape, seq = (boundary.num_elements,), self._sequence + operation.batch
            self.wire.expect(shape, dtype=boundary.dtype, source=source, lane=lane, seq=seq)

    def _need(self, operation: Operation) -> tuple[int, str, int | None]:
        if operation.kind == "forward":
            return self.segment[0], "activations", self.mesh.before
        return self.segment[1], "errors", self.mesh.after

    def _forward(self, number: int, cut: int) -> None:
        part, (start, stop) = self._parts[number], self.segment
        x = self._input(number).requires_grad_(start > cut)
        with self.clock.within("forward"):
            frozen = max(start, min(stop, cut))
            y = self.halves.prefix(x, start, frozen) if frozen > start else x
            if frozen < stop:
                y = self.halves.part(y, frozen, stop)
        if self.is_last:
            y = self._weighted_loss(y.float(), part.labels)
        else:
            self._put(stop, len(part.labels), y, "activations", self._sequence + number)
        if frozen < stop:
            self._kept[number] = Kept(x, y)

    def _input(self, number: int) -> Tensor:
        """Return what a micro-batch brings to this rank's blocks."""
        part = self._parts[number]
        if self.mesh.before is not None:
            return self._get(self.segment[0], len(part.labels), "activations", self._sequence + number)
        if part.place == 0:
            with self.clock.within("data"):
                self._images = self.load(part.batch).tensor_split(self.plan.micro_batches)
        return self._images[part.place].detach()

    def _weighted_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        share = len(labels) / sum(len(part.labels) for part in self._parts)
        loss = self.objective.loss(logits, Mixture(logits, labels)) * share
        self._loss += loss.item()
        self._logits.append(logits.detach())
        return loss

    def _backward(self, number: int, cut: int) -> None:
        start, stop = self.segment
        rows, kept = len(self._parts[number].labels), self._kept.pop(number)
        error = None if self.is_last else self._get(stop, rows, "errors", self._sequence + number)
        with self.clock.within("backward"):
            kept.output.backward(error)
        if start > cut and self.mesh.before is not None:
            assert kept.input.grad is not None, "every block uses its input"
            self._put(start, rows, kept.input.grad, "errors", self._sequence + number)

    def _put(self, depth: int, rows: int, tensor: Tensor, lane: str, seq: int) -> None:
        to = self.mesh.before if lane == "errors" else self.mesh.after
        assert to is not None, "only neighbours are sent to"
        self.wire.put(self.boundaries[rows][depth].flat(tensor.detach()), to=to, lane=lane, seq=seq)

    def _get(self, depth: int, rows: int, lane: str, seq: int) -> Tensor:
        source = self.mesh.after if lane == "errors" else self.mesh.before
        assert source is not None, "only neighbours send"
        boundary = self.boundaries[rows][depth]
        with self.clock.within("allreduce"):
            memory = self.wire.get((boundary.num_elements,), dtype=boundary.dtype, source=source, lane=lane, seq=seq)
        return boundary.formed(memory)
