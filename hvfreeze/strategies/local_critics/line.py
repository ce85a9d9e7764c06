"""The messages between ranks: outputs of groups forward, and the losses of each batch back.

    rank 0                    rank 1                    ...   rank P-1
    images -> groups -> out   -> groups -> out          ->    groups -> losses
                     (B,) <-- losses      (B,) <-- losses

No rank waits for a backward pass of another. A rank's last critic learns from the next rank's losses of a batch while
the next rank continues with it. Until then, the rank may run its groups for the next batch, but no further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvfreeze.comm.agreement import TensorLayout
from hvfreeze.comm.point_to_point import Wire
from hvfreeze.model.segments import Segment
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.model_parallel import expect, receive

LANES = ("activations", "losses")
EVALUATION = ("evaluation.activations", "evaluation.logits")


def batches_ahead(ranks: int) -> int:
    """Return the number of steps after which a step's signals are awaited: how far front ranks may run ahead.

    The first of P ranks has begun batch t when the last one has ended batch t - P; one more step covers the signals'
    transfer.
    """
    return ranks + 1 if ranks > 1 else 0


@dataclass(frozen=True)
class LinePlan:
    """The groups of each rank; equal on all ranks."""

    groups: tuple[Segment, ...]
    """Blocks of each group."""
    ranks: tuple[Segment, ...]
    """Groups lo..hi-1 of each rank."""

    def blocks(self, rank: int) -> Segment:
        """Return the blocks of a rank."""
        start, stop = self.ranks[rank]
        return self.groups[start][0], self.groups[stop - 1][1]

    def bytes_per_batch(self, boundaries: Sequence[TensorLayout]) -> dict[str, int]:
        """Return the bytes that all ranks send per batch that critics learn from, by lane; boundaries are by depth."""
        inner = [self.blocks(rank)[0] for rank in range(1, len(self.ranks))]
        rows = boundaries[0].shape[0]
        return {
            "activations": sum(boundaries[depth].num_bytes for depth in inner),
            "losses": len(inner) * rows * torch.float32.itemsize,
        }


@dataclass
class Line:
    """One rank's messages, of training or of evaluation, which also sends the logits of its exits to the last rank."""

    plan: LinePlan
    rank: int
    wire: Wire
    boundaries: Sequence[TensorLayout]
    """Layouts by depth, for a batch."""
    clock: PhaseClock
    lanes: tuple[str, str] = LANES
    """Lanes of outputs and of losses or logits."""

    @property
    def before(self) -> int | None:
        """The rank with the previous groups, None on the first."""
        return self.rank - 1 if self.rank > 0 else None

    @property
    def after(self) -> int | None:
        """The rank with the next groups, None on the last."""
        return self.rank + 1 if self.rank + 1 < len(self.plan.ranks) else None

    def expect_input(self, seq: int) -> None:
        """Receive the input of batch `seq` while this rank computes."""
        if self.before is not None:
            expect(self.wire, self._input, source=self.before, lane=self.lanes[0], seq=seq)

    def input(self, seq: int, load: Callable[[], Tensor]) -> Tensor:
        """Return this rank's input for batch `seq`: from the previous rank, or loaded on the first."""
        if self.before is None:
            with self.clock.within("data"):
                return load()
        with self.clock.within("allreduce"):
            return receive(self.wire, self._input, source=self.before, lane=self.lanes[0], seq=seq)

    def pass_on(self, output: Tensor, seq: int) -> None:
        """Send the output of this rank's groups to the next rank, if there is one."""
        if self.after is not None:
            boundary = self.boundaries[self.plan.blocks(self.rank)[1]]
            self.wire.put(boundary.flat(output), to=self.after, lane=self.lanes[0], seq=seq)

    def hand_back(self, losses: Tensor, seq: int) -> None:
        """Send the losses of this rank's first group, (B,), to the previous rank, whose critic learns from them."""
        if self.before is not None:
            self.wire.put(losses, to=self.before, lane=self.lanes[1], seq=seq)

    def losses(self, seq: int) -> Tensor:
        """Return the losses, (B,), of the group after this rank's last one."""
        assert self.after is not None, "the groups of the last rank have no successor"
        return self._get(self.boundaries[0].shape[0], self.after, seq)

    def gather(self, logits: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits, (B, classes), of all exits on the last rank, given each rank's own; [] elsewhere."""
        last = len(self.plan.ranks) - 1
        if self.rank < last:
            for number, each in enumerate(logits, self.plan.ranks[self.rank][0]):
                self.wire.put(each, to=last, lane=self.lanes[1], seq=number)
            return []
        rows, classes = logits[-1].shape
        found = [
            self._get(rows * classes, rank, number).view(rows, classes)
            for rank, groups in enumerate(self.plan.ranks[:-1])
            for number in range(*groups)
        ]
        return [*found, *logits]

    @property
    def _input(self) -> TensorLayout:
        return self.boundaries[self.plan.blocks(self.rank)[0]]

    def _get(self, elements: int, source: int, seq: int) -> Tensor:
        with self.clock.within("allreduce"):
            return self.wire.get((elements,), source=source, lane=self.lanes[1], seq=seq)
