"""Rounds: steps that every rank makes alone, at whose end all ranks meet and hear what happened to each.

Where the model is looked at in the middle of a round, for an evaluation, a checkpoint or the end, all ranks see one
model for that, and then go on from their own.
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
"""That a rank hands over when ranks meet."""


@dataclass
class Rounds:
    """How far a run is in its rounds. A rank that meets numbers that are not finite waits for the round's end."""

    world: World
    local_steps: int
    """Of a round."""
    ended: int = 0
    done: int = 0
    """Steps of the present round; a round may last over the end of an epoch."""
    signal_bytes: int = 0
    _broken: str = ""
    """Why this rank trains no more."""

    def step_alone(self, step: Callable[[], StepResult]) -> StepResult:
        """Make and count a step of this rank, or only count it where this rank trains no more. Not a collective."""
        self.done += 1
        if not self._broken:
            try:
                return step()
            except NumericsError as error:
                self._broken = str(error)
        return StepResult({}, {}, leave=False)

    @property
    def ends(self) -> bool:
        """Whether the step that was just made ends its round; the same on all ranks."""
        return self.done == self.local_steps

    def meet(self, *, leave: bool = False) -> bool:
        """Tell whether some rank was asked to leave. Collective.

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
        """Begin the next round."""
        self.ended, self.done = self.ended + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the run is; equal on all ranks."""
        return {"ended": self.ended, "done": self.done, "signal_bytes": self.signal_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.ended, self.done, self.signal_bytes = state["ended"], state["done"], state["signal_bytes"]

    @staticmethod
    def begun_anew(state: dict[str, Any]) -> dict[str, Any]:
        """Return the state at the beginning of the next round."""
        unfinished = int(state["done"] > 0)
        return {**state, "ended": state["ended"] + unfinished, "done": 0}


@dataclass(eq=False)
class RoundStrategy:
    """What strategies have in common whose ranks train alone in rounds; see `Strategy`."""

    replica: DataParallel
    """This rank's, alone in its own world."""
    world: World
    """All ranks."""
    wire: Wire
    rounds: Rounds

    @property
    def cut(self) -> int:
        """Number of frozen blocks."""
        return self.replica.cut

    @property
    def models(self) -> Sequence[str]:
        """The one model."""
        return self.replica.models

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Get ready for these batches. Collective."""
        if not training:
            self._look()
        self.replica.begin_epoch(batches, training=training)

    def settle(self) -> None:
        """Do nothing: whoever looks at the model sees one that all ranks share."""

    def check(self, *, step: int) -> str:
        """Return the digest of what is seen; raise where it is not equal on all ranks. Collective."""
        self._look()
        return check_replicas(self.replica.chain.model, self.world, step=step)

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield what is seen. Collective."""
        self._look()
        yield from self.replica.whole_models()

    def close(self) -> None:
        """Keep what is cached and let go of all files."""
        self.replica.close()

    def _look(self) -> None:
        """Show one model on all ranks, until the next step. Collective."""
        raise NotImplementedError

    def _sent_by_all(self) -> Counter[str]:
        """Return the bytes that all ranks have sent, by lane. Collective."""
        sent = Counter[str]()
        for theirs in self.world.allgather_object(self.wire.bytes_sent(), name="round.report"):
            sent.update(theirs)
        return sent
