"""The pipeline: what one rank does of a step, and what it sends to its neighbours in the line.

    partition 0            partition 1          ...   partition P-1
    images -> blocks  ->   blocks   ->                blocks -> loss          activations, micro-batch by micro-batch
              blocks  <-   blocks   <-                blocks <-               errors, back again

Each micro-batch is kept from its forward to its backward pass. Below the cut nothing comes back: blocks there are a
pure function of their input. What is cached of their output does not come through the line at all, see entry.py.
Source: Awan et al., "HyPar-Flow", ISC 2020, arXiv 1911.05146.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvfreeze.cache.file.rows import is_dense
from hvfreeze.chain.segments import Boundary, Segment
from hvfreeze.data.batches import Batch
from hvfreeze.prefix.features import Halves
from hvfreeze.ranks.mesh import Mesh
from hvfreeze.ranks.wire import Wire
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.grid.line.micro_batches import Kept, Learnt, Part, Rows, joined
from hvfreeze.strategies.grid.line.plan import Plan, Source
from hvfreeze.strategies.schedules import SCHEDULES, Operation
from hvfreeze.strategies.strategy import Answers
from hvfreeze.updates.objective import Mixture, Objective

LANES = ("activations", "errors")
EVALUATION = "evaluation.activations"
"""The lane on which evaluation batches travel."""


@dataclass
class Pipeline:
    """One rank's part in its line."""

    halves: Halves
    wire: Wire
    boundaries: Mapping[int, Sequence[Boundary]]
    """By the rows of a batch or micro-batch, and then by depth."""
    load: Callable[[Batch], Tensor]
    """Returns the images of a batch, (B, C, H, W); asked of the first partition alone."""
    entry: Source
    objective: Objective
    clock: PhaseClock
    plan: Plan = field(init=False)
    mesh: Mesh = field(init=False)
    rows: Rows = field(init=False)
    _parts: list[Part] = field(default_factory=list)
    """Of the step under way."""
    _images: Sequence[Tensor] = ()
    """Of the batch whose parts go forward."""
    _kept: dict[int, Kept] = field(default_factory=dict)
    _logits: list[Tensor] = field(default_factory=list)
    _loss: float = 0.0
    _total: int = 0
    """Samples of the step, of all lines that share its batches."""
    _sequence: int = 0
    """Of the first micro-batch under way."""

    def stand(self, plan: Plan, mesh: Mesh, rows: Rows) -> None:
        """Take this place from now on: who runs which blocks, where this rank is, and what its line works on."""
        self.plan, self.mesh, self.rows = plan, mesh, rows

    @property
    def segment(self) -> Segment:
        """The blocks that this rank runs."""
        return self.plan.segments[self.mesh.partition]

    @property
    def is_last(self) -> bool:
        """Whether this rank has the head."""
        return self.mesh.after is None

    @property
    def reads(self) -> bool:
        """Whether this rank reads what is cached."""
        return self.entry.depth > 0 and self.mesh.partition == self.entry.reader

    def train(self, batches: Sequence[Batch], *, cut: int) -> Learnt | None:
        """Add the gradients of a step's batches to those of this rank's blocks, of which the first `cut` are frozen.

        The last partition returns what it learnt. Collective among the ranks of the line.
        """
        split = [self.rows.of(batch) for batch in batches]
        self._parts = [Part(some, parts, place) for parts in split for place, some in enumerate(parts)]
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
        self._sequence += len(self._parts)
        self._images = ()
        labels = torch.cat([part.batch.labels for part in self._parts])
        mean = self._loss * (total / (self.rows.lines * len(labels)))
        return Learnt(mean, self._loss, Answers(torch.cat(self._logits), labels)) if self.is_last else None

    def answer(self, batch: Batch) -> Tensor | None:
        """Return on the last partition the logits of a batch, (B, classes) float32.

        Collective among the ranks of the line. A rank is at most a batch ahead of the next.
        """
        (start, stop), rows = self.segment, len(batch.ids)
        cached = self.entry.cached(batch)
        if cached and self.mesh.partition < self.entry.reader:
            return None
        comes = self.mesh.before is not None and not (cached and self.reads)
        came = self._get(start, rows, EVALUATION, 0) if comes else None
        if self.reads:
            x, start = self.entry.read(batch, came), self.entry.depth
        else:
            x = self.load(batch) if came is None else came
        x = self.halves.prefix(x, start, stop)
        if self.is_last:
            return x.float()
        self.wire.drain()
        self._put(stop, rows, x, EVALUATION, 0)
        return None

    def _operations(self, cut: int) -> list[Operation]:
        """Return what this rank does in a step; what is frozen has no backward pass, and what is cached no forward."""
        schedule, places = SCHEDULES[self.plan.schedule], self.mesh.partitions
        operations = schedule(self.mesh.partition, places=places, parts=range(len(self._parts)))
        if self.segment[1] > cut:
            return operations
        silent = self.mesh.partition < self.entry.reader
        forwards = [operation for operation in operations if operation.kind == "forward"]
        return [one for one in forwards if not (silent and self.entry.cached(self._parts[one.batch].batch))]

    def _expect(self, operation: Operation) -> None:
        """Let what an operation needs arrive while the one before it is done."""
        depth, lane, source = self._need(operation)
        if source is not None:
            boundary = self.boundaries[len(self._parts[operation.batch].batch.labels)][depth]
            shape, seq = (boundary.num_elements,), self._sequence + operation.batch
            self.wire.expect(shape, dtype=boundary.dtype, source=source, lane=lane, seq=seq)

    def _need(self, operation: Operation) -> tuple[int, str, int | None]:
        if operation.kind == "forward":
            cached = self.reads and self.entry.cached(self._parts[operation.batch].batch)
            return self.segment[0], "activations", None if cached else self.mesh.before
        return self.segment[1], "errors", self.mesh.after

    def _forward(self, number: int, cut: int) -> None:
        labels, (start, stop) = self._parts[number].batch.labels, self.segment
        x, at = self._input(number)
        with self.clock.within("forward"):
            x = x.requires_grad_(start > cut)
            frozen = max(at, min(stop, cut))
            y = dense(self.halves.prefix(x, at, frozen)) if frozen > at else x
            if frozen < stop:
                y = self.halves.part(y, frozen, stop)
        if self.is_last:
            y = self._weighted_loss(y.float(), labels)
        else:
            self._put(stop, len(labels), y, "activations", self._sequence + number)
        if frozen < stop:
            self._kept[number] = Kept(x, y)

    def _input(self, number: int) -> tuple[Tensor, int]:
        """Return what a micro-batch brings to this rank, and how many blocks that has behind it."""
        (batch, siblings, place), start = self._parts[number], self.segment[0]
        comes = self.mesh.before is not None and not (self.reads and self.entry.cached(batch))
        came = self._get(start, len(batch.labels), "activations", self._sequence + number) if comes else None
        if self.reads:
            return self.entry.read(batch, came), self.entry.depth
        if came is not None:
            return came, start
        with self.clock.within("data"):
            if self.entry.depth > 0:
                # Not all of them need come in here.
                return self.load(batch), start
            if place == 0:
                self._images = self.load(joined(siblings)).split([len(each.labels) for each in siblings])
        return self._images[place].detach(), start

    def _weighted_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        # Lines are averaged over, but those of one replica share its batches.
        share = len(labels) * self.rows.lines / self._total
        loss = self.objective.loss(logits, Mixture(logits, labels)) * share
        self._loss += loss.item()
        self._logits.append(logits.detach())
        return loss

    def _backward(self, number: int, cut: int) -> None:
        start, stop = self.segment
        rows, kept = len(self._parts[number].batch.labels), self._kept.pop(number)
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


def dense(x: Tensor) -> Tensor:
    """Return `x` as it would come from the cache, which keeps dense tensors only."""
    return x if is_dense(x.shape, x.stride()) else x.contiguous()
