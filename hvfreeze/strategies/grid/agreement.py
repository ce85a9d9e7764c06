"""What all ranks of a grid settle in a step: whether it is sound, whether one leaves, and the norm of all gradients.

Each rank knows its own blocks' part of it alone, and the last one of a line the loss.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvfreeze.errors import DivergedError, NumericsError
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.ranks.world import World


@dataclass(frozen=True)
class Agreed:
    """Equal on all ranks."""

    loss: float
    """The mean over replicas."""
    leave: bool
    norm: float
    """Of the averaged gradients of all blocks; 0 where nobody asks for it."""


@dataclass
class Agreement:
    """One short exchange a step among all ranks."""

    world: World
    replicas: int
    clips: bool
    """Whether the norm is asked for."""
    bytes: int = 0
    """That this rank has handed over."""

    def reach(self, loss: float | None, reducer: Reducer, *, leave: bool, step: int) -> Agreed:
        """Return what holds for all, after gradients have been averaged and before the update.

        Collective: every rank of the world must call this.

        Args:
            loss: of this replica, on its last rank; None on the others.
            reducer: has this rank's gradients.
            leave: this rank was asked to leave.
            step: for the message.

        Raises:
            NumericsError: a loss or a gradient is not finite; on all ranks.
        """
        finite = loss is None or math.isfinite(loss)
        sound = reducer.gradients_are_finite()
        # The first three are whole numbers, whose sums are exact.
        numbers = [not finite, not sound, leave, loss if loss is not None and finite else 0.0]
        mine = torch.tensor([*numbers, squared_norm(reducer) if sound and self.clips else 0.0], dtype=torch.float64)
        losses, broken, leaving, total, squares = self.world.allreduce_sum(mine, name="grid.signals").tolist()
        self.bytes += mine.nbytes if self.world.size > 1 else 0
        if losses or broken:
            what = f"the loss is not finite on {int(losses)} of {self.replicas} replicas"
            if not losses:
                what = f"the gradients are not finite on {int(broken)} of {self.world.size} ranks"
            raise NumericsError(
                f"step {step}: {what}; no update was made; lower --lr, or add --lr-warmup or --clip-grad, and go on "
                "from the last checkpoint"
            )
        return Agreed(total / self.replicas, bool(leaving), math.sqrt(squares / self.replicas))

    def check_cut(self, cut: int, *, step: int) -> None:
        """Compare the cut after a vote, which each partition's replicas have counted by themselves.

        Ranks of a line that disagree would wait for errors that nobody sends.
        Collective: every rank of the world must call this.

        Raises:
            DivergedError: ranks have different cuts; on all ranks.
        """
        cuts = self.world.allgather_object(cut, name="grid.cut")
        odd = next((rank for rank, theirs in enumerate(cuts) if theirs != cuts[0]), None)
        if odd is not None:
            error = DivergedError(
                f"after the vote of step {step} rank {odd} has cut {cuts[odd]} and rank 0 cut {cuts[0]}; give all "
                "ranks equal processors and versions"
            )
            error.everywhere = True
            raise error


def digest_of(everyone: Sequence[Mapping[int, str]], names: Sequence[str], *, step: int) -> str:
    """Return the digest over all blocks, which does not depend on where they are cut.

    Args:
        everyone: of each rank, the digests of the blocks that it holds.
        names: of all blocks.
        step: for the message.

    Raises:
        DivergedError: ranks hold different values of one block.
    """
    found: dict[int, str] = {}
    for rank, digests in enumerate(everyone):
        for block, digest in digests.items():
            if found.setdefault(block, digest) != digest:
                other = next(r for r, theirs in enumerate(everyone) if block in theirs)
                raise DivergedError(
                    f"block {names[block]} differs between ranks {other} and {rank} after step {step}; parameters must "
                    "change by updates only"
                )
    return hashlib.sha256("\n".join(found[block] for block in sorted(found)).encode()).hexdigest()


def squared_norm(reducer: Reducer) -> float:
    """Return the sum of the squares of this rank's gradients."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients_of(reducer)]
    return float((torch.stack(norms) ** 2).sum()) if norms else 0.0


def clip(reducer: Reducer, *, norm: float, most: float | None) -> None:
    """Scale this rank's gradients as those of all blocks must be, so that their norm is at most `most`."""
    if most is not None and norm > most:
        for gradient in gradients_of(reducer):
            gradient.mul_(most / norm)


def gradients_of(reducer: Reducer) -> list[Tensor]:
    """Return this rank's gradients, averaged."""
    return [parameter.grad for _, parameter in reducer.carried if parameter.grad is not None]
