"""The pipeline: ranks compute the frozen trunk's output together, segment by segment, and send it to the heads.

    place 0                 place 1                ...   place P-1
    images -> segment 0  -> segment 1  ->                segment P-1 -> features -> every rank with a head there

Features are taken where a head begins, so models whose heads differ in depth share one trunk. No gradient is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvfreeze.comm.agreement import TensorLayout
from hvfreeze.comm.point_to_point import Wire
from hvfreeze.data.batches import Batch
from hvfreeze.model.segments import RunBlocks, Segment
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.model_parallel import expect, receive
from hvfreeze.strategies.schedules import Operation, batches_begun, tick_schedule

LANES = ("activations", "features", "labels")


@dataclass(frozen=True)
class LinePlan:
    """The blocks of each rank, and the ranks that need their output; equal on all ranks."""

    segments: tuple[Segment, ...]
    """Segments by place; the rank at place p is rank p."""
    depths: tuple[tuple[int, ...], ...]
    """Depths of each rank's heads, in blocks, ascending and unique."""
    rows: tuple[tuple[int, ...], ...]
    """Rows of the label table that each rank's heads train on."""
    labels: str = "replay"
    """How labels reach a rank: `ride`, `direct` or `replay`."""

    @property
    def places(self) -> int:
        """Number of segments, and of ranks with one."""
        return len(self.segments)

    def place_of(self, rank: int) -> int | None:
        """Return the place of a rank, None if it has no segment or there are no heads."""
        return rank if rank < self.places and any(self.depths) else None

    def source_of(self, depth: int) -> int:
        """Return the rank that computes the features behind the first `depth` blocks."""
        return next(place for place, (start, stop) in enumerate(self.segments) if start < depth <= stop)

    def receivers(self, depth: int) -> list[int]:
        """Return the ranks with a head at `depth`."""
        return [rank for rank, depths in enumerate(self.depths) if depth in depths]

    def bytes_per_batch(self, boundaries: Sequence[TensorLayout], *, rows: int) -> dict[str, int]:
        """Return the bytes that all ranks send per batch, by lane; `rows` are the batch's samples."""
        inner = [stop for _, stop in self.segments[:-1]]
        served = [(d, rank) for rank, depths in enumerate(self.depths) for d in depths if rank != self.source_of(d)]
        labels = 0
        if self.labels == "direct":
            labels = sum(map(len, self.rows[1:]))
        elif self.labels == "ride":
            labels = len(inner) * sum(map(len, self.rows))
            sources = [self.source_of(depths[-1]) if depths else rank for rank, depths in enumerate(self.depths)]
            labels += sum(len(local) for rank, local in enumerate(self.rows) if rank != sources[rank])
        return {
            "activations": sum(boundaries[stop].num_bytes for stop in inner),
            "features": sum(boundaries[depth].num_bytes for depth, _ in served),
            "labels": labels * rows * torch.int64.itemsize,
        }


@dataclass(frozen=True)
class Served:
    """The input of a rank's heads."""

    features: dict[int, Tensor]
    """Features by depth, without gradient."""
    labels: Tensor | None
    """Labels, (heads, B) int64, as received; None if each rank reads its own."""


@dataclass
class Line:
    """One rank's part in the pipeline."""

    plan: LinePlan
    rank: int
    wire: Wire
    boundaries: Sequence[TensorLayout]
    """Layouts by depth, for a training batch."""
    run: RunBlocks
    load: Callable[[Batch], Tensor]
    """Loads the images of a batch; called on the rank at place 0 only."""
    labels_of: Callable[[Batch], Tensor]
    """Loads the labels, (models, B) int64; called on the rank at place 0 only."""
    clock: PhaseClock
    lanes: str = ""
    """Prefix of the lanes' names."""
    forwards: int = 0
    """Number of batches that this rank's segment has processed."""
    _batches: list[Batch] = field(default_factory=list)
    _operations: deque[Operation] = field(default_factory=deque)
    _first: int = 0
    """Sequence number of the first of `_batches`."""
    _trained: int = 0
    _coming: int = 0
    """How many of `_batches` will enter the pipeline."""
    _kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Features by batch and depth, and labels under depth 0, that this rank has computed for itself."""

    def begin(self, batches: Sequence[Batch]) -> None:
        """Announce these batches, in order; equal on all ranks. Collective."""
        self.finish()
        self._first += len(self._batches)
        self._batches, self._trained, self._coming = list(batches), 0, len(batches)
        place = self.plan.place_of(self.rank)
        self._operations = deque(tick_schedule(place, places=self.plan.places, batches=len(self._batches)))

    @property
    def next(self) -> Batch | None:
        """The batch whose features `serve` returns next."""
        return self._batches[self._trained] if self._trained < len(self._batches) else None

    def serve(self) -> Served:
        """Return the features of the next batch, while ranks work on later ones. Collective."""
        while (operation := self._operations.popleft()).kind == "forward":
            self._forward(operation.batch)
        self._trained += 1
        return self._receive(operation.batch)

    def finish(self) -> None:
        """Receive every batch that has entered the pipeline, and drop the others. Collective.

        The wire is not drained, because it may hold messages of another pipeline.
        """
        self._coming = batches_begun(self._trained, places=self.plan.places, batches=len(self._batches))
        for operation in self._operations:
            if operation.batch < self._coming:
                self._forward(operation.batch) if operation.kind == "forward" else self._receive(operation.batch)
        self._operations.clear()
        self._kept.clear()
        self._trained = len(self._batches)

    def _forward(self, index: int) -> None:
        """Run this rank's segment for a batch, and send its outputs to the ranks that need them."""
        plan, batch = self.plan, self._batches[index]
        start, stop = plan.segments[self.rank]
        labels: Tensor | None = None
        if self.rank == 0:
            with self.clock.within("data"):
                x = self.load(batch)
            labels = None if plan.labels == "replay" else self.labels_of(batch)
        else:
            x = self._get_boundary(start, self.rank - 1, "activations", index)
            if plan.labels == "ride":
                labels = self._get_labels(sum(map(len, plan.rows)), self.rank - 1, index, len(batch.ids))
        if labels is not None and plan.labels == "direct":
            self._send_labels(labels, index, range(len(plan.rows)))
        self._expect(index)
        self.forwards += 1
        for depth in range(start + 1, stop + 1):
            with self.clock.within("forward"):
                x = self.run(x, depth - 1, depth)
            receivers = plan.receivers(depth)
            for receiver in receivers:
                if receiver == self.rank:
                    self._kept[index, depth] = x
                else:
                    self._put(self.boundaries[depth].flat(x), receiver, "features", index)
            if labels is not None and plan.labels == "ride":
                self._send_labels(labels, index, [r for r in receivers if plan.depths[r][-1] == depth])
        if self.rank < plan.places - 1:
            self._put(self.boundaries[stop].flat(x), self.rank + 1, "activations", index)
            if labels is not None and plan.labels == "ride":
                self._put(labels, self.rank + 1, "labels", index)

    def _send_labels(self, labels: Tensor, index: int, receivers: Sequence[int]) -> None:
        for receiver in receivers:
            rows = labels[list(self.plan.rows[receiver])]
            if receiver == self.rank:
                self._kept[index, 0] = rows
            elif len(rows):
                self._put(rows, receiver, "labels", index)

    def _receive(self, index: int) -> Served:
        """Return the input of this rank's heads for a batch, its own or received."""
        plan = self.plan
        depths, rows = plan.depths[self.rank], plan.rows[self.rank]
        features = {}
        for depth in depths:
            own = self._kept.pop((index, depth), None)
            source = plan.source_of(depth)
            features[depth] = self._get_boundary(depth, source, "features", index) if own is None else own
        labels = self._kept.pop((index, 0), None)
        if rows and labels is None and plan.labels != "replay":
            source = 0 if plan.labels == "direct" else plan.source_of(depths[-1])
            labels = self._get_labels(len(rows), source, index, len(self._batches[index].ids))
        return Served(features, labels)

    def _expect(self, index: int) -> None:
        """Start to receive this batch's features and the next input of its segment while this rank computes.

        Every message must be received: behind place 0, the next batch has entered the pipeline when this one is done.
        """
        plan = self.plan
        wanted = [("features", d, plan.source_of(d), index) for d in plan.depths[self.rank]]
        if self.rank > 0 and index + 1 < self._coming:
            wanted.append(("activations", plan.segments[self.rank][0], self.rank - 1, index + 1))
        for lane, depth, source, batch in wanted:
            if source != self.rank:
                seq = self._first + batch
                expect(self.wire, self.boundaries[depth], source=source, lane=self.lanes + lane, seq=seq)

    def _put(self, tensor: Tensor, to: int, lane: str, index: int) -> None:
        self.wire.put(tensor, to=to, lane=self.lanes + lane, seq=self._first + index)

    def _get_boundary(self, depth: int, source: int, lane: str, index: int) -> Tensor:
        seq = self._first + index
        with self.clock.within("allreduce"):
            return receive(self.wire, self.boundaries[depth], source=source, lane=self.lanes + lane, seq=seq)

    def _get_labels(self, models: int, source: int, index: int, rows: int) -> Tensor:
        lane, seq = self.lanes + "labels", self._first + index
        with self.clock.within("allreduce"):
            return self.wire.get((models, rows), dtype=torch.int64, source=source, lane=lane, seq=seq)
