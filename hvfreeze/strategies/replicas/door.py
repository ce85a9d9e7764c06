"""Plain data parallelism, the default: every rank holds the whole model, and ranks vote which blocks are frozen.

    prefix (cached or computed, no gradient) -> suffix -> loss -> backward while gradients travel -> update -> vote

Replicas start equal and change only by averaged gradients and by decisions that all ranks take alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.data.batches import Batch
from hvfreeze.errors import NumericsError
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.freezing.voting.vote import Decision
from hvfreeze.heads.multilevel import head_of
from hvfreeze.heads.solution import Solution
from hvfreeze.heads.solving import rows_of, solve
from hvfreeze.prefix.features import Features, Halves
from hvfreeze.ranks.equal_models import check_replicas, running_statistics
from hvfreeze.ranks.exchange.signals import Signals
from hvfreeze.ranks.machine.share import memory_budget
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.replicas.exchange_plan import ExchangePlan
from hvfreeze.strategies.replicas.pooling import pooled
from hvfreeze.strategies.strategy import MODEL, Answers, State, StepResult, WholeModel
from hvfreeze.updates.objective import Objective
from hvfreeze.updates.update import Update


class Replicas:
    """Trains equal replicas; see `Strategy` for what its methods promise.

    Args:
        freezer: decides the cut; holds the chain, the optimizer, the reducer and the world.
        halves: run the blocks before and behind the cut.
        training: the frozen prefix's output for training batches.
        evaluation: the same for evaluation batches.
        update: makes the step of the freezer's optimizer.
        objective: what is minimised.
        plan: what the network costs, and how gradients are compressed for it.
        clock: where the seconds of a step go.
        advice: what a user can do about numbers that are not finite.
    """

    def __init__(
        self,
        freezer: Freezer,
        halves: Halves,
        training: Features,
        evaluation: Features,
        *,
        update: Update,
        objective: Objective,
        plan: ExchangePlan,
        clock: PhaseClock,
        advice: str,
    ) -> None:
        self.halves, self.update, self.objective, self.plan = halves, update, objective, plan
        self.freezer, self.training, self.evaluation, self.clock = freezer, training, evaluation, clock
        self.chain, self.optimizer, self.reducer = freezer.chain, freezer.optimizer, freezer.reducer
        self._advice = advice
        self._moves_followed = 0
        self._solved: dict[str, Any] = {}

    @property
    def cut(self) -> int:
        """Number of frozen blocks."""
        return self.freezer.cut

    @property
    def models(self) -> Sequence[str]:
        """The one model."""
        return (MODEL,)

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Get ready for these batches; what following the cut takes counts as training time."""
        self._follow_cut()
        (self.training if training else self.evaluation).begin_epoch(batches)

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Make one optimizer step."""
        clock, count, said, value = self.clock, len(batches), [], 0.0
        for number, batch in enumerate(batches, 1):
            clock.enter("forward")
            self.halves.be_in_mode(training=True)
            seen = self.objective.mix(self.training.of(batch), batch.labels, step=self.freezer.step, number=number)
            logits = self.halves.suffix(seen.features, self.training.cut).float()
            loss = self.objective.loss(logits, seen) / count
            value += loss.item()
            said.append(logits.detach())

            clock.enter("backward")
            if number == 1:
                self.reducer.begin(passes=count)
            if number == count:
                # All ranks: the signals, then each bucket of gradients, travel while the last backward pass runs.
                self.reducer.signal(nonfinite=not math.isfinite(value), leave=leave)
            loss.backward()
        clock.enter("allreduce")
        signals = self.reducer.finish()
        self._stop_unless_finite(signals)

        clock.enter("optimizer")
        self.update.make(rate)

        # All ranks, at the end of an interval: the vote, and the same cut in the same step.
        clock.enter("vote")
        decision: Decision | None = self.freezer.after_step(value)
        self._follow_cut()
        clock.enter("data")
        self.plan.after_step()
        answers = {MODEL: Answers(joined(said), joined([batch.labels for batch in batches]))}
        return StepResult(losses={MODEL: value}, answers=answers, leave=bool(signals.leave), decision=decision)

    def solve_head(
        self,
        batches: Sequence[Batch],
        *,
        held_out: NDArray[np.bool_],
        judged: bool,
        stop: Callable[[int], bool],
        add: Callable[[Answers, float], None],
    ) -> Solution | None:
        """Solve the head on the features of `batches`; see `SolvesHeads`."""
        self.begin_epoch(batches)
        world, layer, features = self.freezer.world, head_of(self.chain), self.training
        memory = memory_budget(world.local_size)
        rows = rows_of(
            batches, layer, fetch=features.of, expect=features.expect, held_out=held_out, memory_bytes=memory
        )
        with self.clock.within("optimizer"):
            fit = solve(
                rows, layer, world=world, judged=judged, stop=stop, count=lambda *of: add(Answers(*of[:2]), of[2])
            )
        if fit is not None:
            self.reducer.payload_bytes += fit.exchanged_bytes
            self._solved = {"head": fit.summary()}
        return fit

    def settle(self) -> None:
        """Average the running statistics; everything else is equal on all ranks after every step."""
        self.freezer.average_statistics()

    def predict(self, batch: Batch) -> dict[str, Answers]:
        """Return what the model says of an evaluation batch. Not a collective."""
        self.halves.be_in_mode(training=False)
        with torch.no_grad():
            logits = self.halves.suffix(self.evaluation.of(batch), self.evaluation.cut).float()
        return {MODEL: Answers(logits, batch.labels)}

    def check(self, *, step: int) -> str:
        """Return the digest of the model; raise where replicas differ."""
        return check_replicas(self.chain.model, self.freezer.world, step=step)

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield the model, which every rank holds."""
        yield WholeModel(MODEL, self.chain.model.state_dict())

    def state_dict(self) -> State:
        """Return the model and the optimizer, which ranks share, and this rank's statistics and accumulators."""
        statistics = [tensor.clone() for pair in running_statistics(self.chain.modules()) for tensor in pair]
        shared = {
            "model": self.chain.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "solved": self._solved,
            "exchange": self.plan.state_dict(),
            "bytes": [self.reducer.payload_bytes, self.reducer.other_bytes],
        }
        own = {"statistics": statistics, "freezer": self.freezer.state_dict(), "reducer": self.reducer.state_dict()}
        return State(shared, own)

    def load_state_dict(self, state: State) -> None:
        """Continue from a state of the same rank."""
        # The freezer first: it takes frozen parameters out of the optimizer, whose state then fits.
        self.freezer.load_state_dict(state.own["freezer"])
        self.chain.model.load_state_dict(state.shared["model"])
        self.optimizer.load_state_dict(state.shared["optimizer"])
        tensors = [tensor for pair in running_statistics(self.chain.modules()) for tensor in pair]
        for tensor, saved in zip(tensors, state.own["statistics"], strict=True):
            tensor.copy_(saved)
        self.reducer.payload_bytes, self.reducer.other_bytes = state.shared["bytes"]
        self.plan.load_state_dict(state.shared["exchange"])
        self.reducer.load_state_dict(state.own["reducer"])
        self.freezer.seal()
        self._solved = state.shared["solved"]
        self._moves_followed = 0

    def redealt(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield the same state for each rank: what ranks had of their own, pooled. Not a collective."""
        yield from repeat(pooled(owns, restep=restep), size)

    def report(self) -> dict[str, Any]:
        """Return the cut's history, what was exchanged, and what the cache did."""
        return {
            "allreduce_bytes": self.reducer.payload_bytes,
            "other_collective_bytes": self.reducer.other_bytes,
            "cut_history": self.freezer.cut_history,
            "cache": self.training.caching.report(),
            **self.plan.report(),
            **self._solved,
        }

    def close(self) -> None:
        """Keep what is cached and let go of all files."""
        self.training.close()
        self.evaluation.close()
        # Hooks on gradients would count another strategy's backward passes over the same model.
        self.reducer.carry([])

    def _stop_unless_finite(self, signals: Signals) -> None:
        """Raise on all ranks in the same step when a loss or an averaged gradient is not finite."""
        if signals.nonfinite:
            what = f"the loss is not finite on {signals.nonfinite} of {self.freezer.world.size} ranks"
        elif not self.reducer.gradients_are_finite():
            what = "the gradients are not finite"
        else:
            return
        step = self.freezer.step
        raise NumericsError(
            f"step {step}: {what}; no update was made; {self._advice}, and go on from the last checkpoint"
        )

    def _follow_cut(self) -> None:
        """Let both splits' activations follow the cut, where it has moved since the last call."""
        history = self.freezer.cut_history
        if len(history) != self._moves_followed:
            cuts = [move.cut for move in history]
            for features in (self.training, self.evaluation):
                features.move(cuts[-1], before=cuts[:-1])
            self.plan.follow()
            self._moves_followed = len(history)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensors one after the other; one alone as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
