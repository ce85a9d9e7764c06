"""Rounds of steps that every rank makes alone; at their end all ranks synchronize.

If the model is needed inside a round, for an evaluation, a checkpoint or the end, all ranks temporarily see one common
model, and continue from their own afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvfreeze.comm.point_to_point import Wire
from hvfreeze.comm.replica_sync import check_replicas
from hvfreeze.comm.world import World
from hvfreeze.data.batches import Batch
from hvfreeze.errors import NumericsError
from hvfreeze.strategies.base import StepResult, WholeModel
from hvfreeze.strategies.data_parallel import DataParallel

SIGNAL_BYTES = 8
"""Bytes that a rank sends at the end of a round."""


@dataclass
class Rounds:
    """A run's position in its rounds. A rank with NaN or Inf waits for the end of the round."""

    world: World
    local_steps: int
    """Steps of a round."""
    ended: int = 0
    done: int = 0
    """Steps made in the current round, which may extend over the end of an epoch."""
    signal_bytes: int = 0
    _broken: str = ""
    """The reason why this rank trains no more, or ""."""

    def step_locally(self, step: Callable[[], StepResult]) -> StepResult:
        """Make and count a step of this rank; only count it if this rank trains no more. Not a collective."""
        self.done += 1
        if not self._broken:
            try:
                return step()
            except NumericsError as error:
                self._broken = str(error)
        return StepResult({}, {}, leave=False)

    @property
    def ends(self) -> bool:
        """Whether the last step ended its round; equal on all ranks."""
        return self.done == self.local_steps

    def meet(self, *, leave: bool = False) -> bool:
        """Return True if some rank was asked to leave. Collective.

        Raises:
            NumericsError: a rank trains no more; on all ranks.
        """
        told = torch.tensor([leave, bool(self._broken)], dtype=torch.int32)
        self.signal_bytes += SIGNAL_BYTES if self.world.size > 1 else 0
        leaves, broken = self.world.allreduce_sum(told, name="round.signals").tolist()
        if broken:
            reasons = self.world.allgather_object(self._broken, name="round.broken")
            rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
            raise NumericsError(f"rank {rank}: {reason}")
        return bool(leaves)

    def end(self) -> None:
        """Start the next round."""
        self.ended, self.done = self.ended + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position; equal on all ranks."""
        return {"ended": self.ended, "done": self.done, "signal_bytes": self.signal_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`."""
        self.ended, self.done, self.signal_bytes = state["ended"], state["done"], state["signal_bytes"]

    @staticmethod
    def at_round_start(state: dict[str, Any]) -> dict[str, Any]:
        """Return the state at the begin of the next round."""
        unfinished = int(state["done"] > 0)
        return {**state, "ended": state["ended"] + unfinished, "done": 0}


@dataclass(eq=False)
class RoundStrategy:
    """The common part of strategies whose ranks train alone in rounds; see `Strategy`."""

    replica: DataParallel
    """This rank's replica, in a separate world."""
    world: World
    """All ranks."""
    wire: Wire
    rounds: Rounds

    @property
    def cut(self) -> int:
        """The number of frozen blocks."""
        return self.replica.cut

    @property
    def models(self) -> Sequence[str]:
        """The name of the only model."""
        return self.replica.models

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Prepare for these batches. Collective."""
        if not training:
            self._look()
        self.replica.begin_epoch(batches, training=training)

    def settle(self) -> None:
        """Do nothing: evaluations and checkpoints already see one common model."""

    def check(self, *, step: int) -> str:
        """Return the digest of the common model; raises if it differs between ranks. Collective."""
        self._look()
        return check_replicas(self.replica.chain.model, self.world, step=step)

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield the common model. Collective."""
        self._look()
        yield from self.replica.whole_models()

    def close(self) -> None:
        """Publish cached rows and close all files."""
        self.replica.close()

    def _look(self) -> None:
        """Show one common model on all ranks, until the next step. Collective."""
        raise NotImplementedError

    def _sent_by_all(self) -> Counter[str]:
        """Return the bytes that all ranks have sent, by lane. Collective."""
        sent = Counter[str]()
        for theirs in self.world.allgather_object(self.wire.bytes_sent(), name="round.report"):
            sent.update(theirs)
        return sent
