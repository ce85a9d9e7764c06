"""Rounds of steps that every rank makes alone; at their end all ranks synchronize.

If the model is needed inside a round, for an evaluation, a checkpoint or the end, all ranks temporarily see one common
model, and continue from their own afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
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


@dataclass(eq=False, kw_only=True)
class RoundStrategy:
    """The common part of strategies whose ranks train alone in rounds; see `Strategy`."""

    replica: DataParallel
    """This rank's replica, in a separate world."""
    world: World
    """All ranks."""
    wire: Wire
    local_steps: int
    """Steps of a round."""
    rounds: int = 0
    """Rounds that have ended."""
    done: int = 0
    """Steps made in the current round, which may extend over the end of an epoch."""
    signal_bytes: int = 0

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

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Make a step on this rank alone; all ranks synchronize at the beginning and end of a round.

        Collective at these steps. At the end of a round, ranks also learn whether one was asked to leave.

        Raises:
            NumericsError: NaN or Inf in a loss or gradient; before the update, on this rank only.
        """
        self._continue_alone()
        self.done += 1
        try:
            result = self._step_alone(batches, rate=rate)
        except NumericsError as error:
            # The other ranks would learn of it only at the end of the round, so this rank ends the job.
            error.on_this_rank()
            raise
        if self.done < self.local_steps:
            return result
        with self.replica.clock.within("allreduce"):
            leaves = self._meet(leave=leave)
            self._synchronize()
        self.rounds, self.done = self.rounds + 1, 0
        return StepResult(result.losses, result.answers, leave=leaves)

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

    def _continue_alone(self) -> None:
        """Prepare this rank for its next step. Collective at the beginning of a round."""
        raise NotImplementedError

    def _step_alone(self, batches: Sequence[Batch], *, rate: float) -> StepResult:
        """Make a step; raise NumericsError, before the update, on this rank only."""
        raise NotImplementedError

    def _synchronize(self) -> None:
        """Combine the results of a round. Collective."""
        raise NotImplementedError

    def _meet(self, *, leave: bool) -> bool:
        """Return True if some rank was asked to leave. Collective."""
        signal = torch.tensor([leave], dtype=torch.int32)
        self.signal_bytes += signal.nbytes if self.world.size > 1 else 0
        return bool(self.world.allreduce_sum(signal, name="round.signals"))

    def _position(self) -> dict[str, int]:
        """Return the position in the rounds for a checkpoint; equal on all ranks."""
        return {"ended": self.rounds, "done": self.done, "signal_bytes": self.signal_bytes}

    def _continue_from(self, position: dict[str, int]) -> None:
        """Load a `_position`."""
        self.rounds, self.done, self.signal_bytes = position["ended"], position["done"], position["signal_bytes"]

    def _sent_by_all(self) -> Counter[str]:
        """Return the bytes that all ranks have sent, by lane. Collective."""
        sent = Counter[str]()
        for theirs in self.world.allgather_object(self.wire.bytes_sent(), name="round.report"):
            sent.update(theirs)
        return sent


def next_round(position: dict[str, Any]) -> dict[str, Any]:
    """Return the position at the beginning of the next round."""
    return {**position, "ended": position["ended"] + int(position["done"] > 0), "done": 0}
