"""The Freezer: observes training, asks all ranks for a vote, and moves the cut on all of them in the same step.

A frozen block cannot move: its parameters leave the optimizer with their state, lose their gradient and travel no
more; its modules enter evaluation mode and stay there through every `model.train()`, so that its output is a pure
function of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hvfreeze.chain.blocks import Chain
from hvfreeze.config.sections import VOTE_WEIGHTS, FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Cadence, epochs_until_move
from hvfreeze.freezing.frozen import FrozenPrefix
from hvfreeze.freezing.gradients import GradientSums, Join, Observations, nothing_observed
from hvfreeze.freezing.voting.ballots import hold_vote
from hvfreeze.freezing.voting.criteria import Evidence
from hvfreeze.freezing.voting.proposer import Proposer
from hvfreeze.freezing.voting.vote import Decision
from hvfreeze.freezing.voting.weights import Voter, voting_weight
from hvfreeze.ranks.equal_models import average_running_statistics
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.ranks.world import World
from hvfreeze.runs.moves import Move


class Freezer:
    """Decides with all ranks how many front blocks are frozen, and keeps them so.

    Args:
        chain: the model in blocks.
        optimizer: any torch optimizer over the chain's parameters; frozen parameters leave its groups. What it does
            not hold, or is not trainable now, is left alone: it travels and votes at no cut, and no thaw wakes it.
        reducer: exchanges the gradients of what still trains.
        world: the ranks that vote.
        settings: criterion, guards, weights and quorum.
        cadence: when votes are held.
        voter: this rank's shard, for weights that depend on it.
        held: the blocks lo..hi-1 that this rank has, where the chain is cut over ranks; None is all.
        join: adds up what this rank and those that hold the other blocks have observed; a collective among them.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer,
        world: World,
        settings: FreezeConfig,
        cadence: Cadence,
        voter: Voter = Voter(),  # noqa: B008  (frozen)
        held: tuple[int, int] | None = None,
        join: Join = list,
    ) -> None:
        self.chain, self.optimizer, self.reducer, self.world = chain, optimizer, reducer, world
        self.settings, self.cadence, self.voter = settings, cadence, voter
        self.step = 0
        self.cut_history: list[Move] = []
        self._prefix = FrozenPrefix(chain, optimizer, held=held)
        deciding = [settings.freeze] if settings.votes else []
        self._proposers = {name: Proposer(name) for name in [*deciding, *settings.shadow_names()]}
        watching = any(proposer.criterion.watches_gradients for proposer in self._proposers.values())
        source = settings.signal if watching or settings.vote_weight == "snr" else "none"
        sums = GradientSums(chain, step_norms=settings.vote_weight == "snr", held=held, join=join)
        self._seen = Observations(sums, source)
        self._check_settings()
        self._move(settings.cut if settings.cut is not None else 0)
        self._prefix.unseal()

    @property
    def cut(self) -> int:
        """Number of frozen blocks."""
        return self._prefix.cut

    def after_step(self, loss: float) -> Decision | None:
        """Count an optimizer step; at the end of an interval, vote and apply the outcome.

        Collective: every rank of the world must call this after every step, with its own mean loss.

        Returns:
            The decision where a vote was held, else None.

        Raises:
            DivergedError: something changed a frozen parameter or buffer since it was frozen.
        """
        self._prefix.check(step=self.step)
        self.step += 1
        self._seen.add_step(loss, self._prefix.carried)
        if not self._proposers or not self.cadence.ends_interval(self.step):
            return None
        self._seen.end_interval()
        for proposer in self._proposers.values():
            proposer.intervals += 1
        decision = self._vote() if self.cadence.votes(self.step) else None
        self._seen.begin_interval(self.cut)
        if decision is not None and decision.moved:
            self._move(decision.cut_after)
        return decision

    def freeze(self, cut: int) -> None:
        """Freeze exactly the first `cut` blocks from now on, without a vote.

        Collective: every rank of the world must call this in the same step.

        Raises:
            UsageError: `cut` is out of range.
        """
        self._prefix.refuse(cut)
        self.average_statistics()
        self._move(cut)
        self._seen.begin_interval(cut)

    def thaw(self, cut: int) -> None:
        """Let every block from `cut` on train again, with fresh optimizer state; the same as `freeze(cut)` backwards.

        Collective: every rank of the world must call this in the same step.

        Raises:
            UsageError: `cut` is deeper than the current cut, or out of range.
        """
        if cut > self.cut:
            raise UsageError(f"thaw: cut ({cut}) must not be deeper than the current cut {self.cut}; use freeze({cut})")
        self.freeze(cut)

    @property
    def epochs_left(self) -> float:
        """Epochs until training ends."""
        return self.cadence.epochs - self.step / self.cadence.steps_per_epoch

    def epochs_until_move(self) -> float:
        """Return the epochs until the cut may be expected to move, infinity where it is fixed."""
        proposer = self._proposers.get(self.settings.freeze)
        if proposer is None:
            return math.inf
        return epochs_until_move(self.cadence, proposer, self._evidence(), step=self.step, history=self.cut_history)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's freeze state: cut, history, position in the interval, accumulators."""
        return {
            "step": self.step,
            "cut": self.cut,
            "cut_history": [list(move) for move in self.cut_history],
            "tracks": {name: proposer.state() for name, proposer in self._proposers.items()},
            **self._seen.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same rank; call it before the optimizer's own `load_state_dict`."""
        self.step = state["step"]
        self._move(state["cut"])
        self.cut_history = [Move(*entry) for entry in state["cut_history"]]
        self._proposers |= {name: Proposer.of(name, *values) for name, values in state["tracks"].items()}
        self._seen.load_state_dict(state)
        self._prefix.unseal()

    @staticmethod
    def redealt(state: dict[str, Any], *, restep: Callable[[int], int]) -> dict[str, Any]:
        """Return a rank's state for a job of another size, whose number of steps at a step is given by `restep`.

        Ranks own other samples there, so that what was observed of the old ones counts no more.
        """
        moves = [Move(*entry) for entry in state["cut_history"]]
        forgetful = {name: Proposer(name) for name in state["tracks"]}
        for name, (cut, *_) in state["tracks"].items():
            forgetful[name].moved(cut)
        return {
            **nothing_observed(state["cut"]),
            "step": restep(state["step"]),
            "cut": state["cut"],
            "cut_history": [list(move._replace(step=restep(move.step))) for move in moves],
            "tracks": {name: proposer.state() for name, proposer in forgetful.items()},
        }

    def average_statistics(self) -> None:
        """Make BatchNorm's running statistics equal on all ranks, those of frozen blocks too, which keep their bits.

        Collective: every rank of the world must call this in the same step.
        """
        self.reducer.other_bytes += average_running_statistics(self.chain.modules(), self.world)
        self.seal()

    def seal(self) -> None:
        """Take frozen parameters and buffers as they are now for what must not change any more."""
        self._prefix.seal()

    def _check_settings(self) -> None:
        self._prefix.refuse(self.settings.cut or 0)
        if self.settings.vote_weight not in VOTE_WEIGHTS:
            count = len(self.settings.vote_weight.split(","))
            if count != self.world.size:
                raise UsageError(
                    f"--vote-weight ({self.settings.vote_weight}) has {count} numbers; "
                    f"it must have one per rank, of which there are {self.world.size}"
                )

    def _move(self, cut: int) -> None:
        self._prefix.move(cut)
        self.cut_history.append(Move(self.step // self.cadence.steps_per_epoch, self.step, cut))
        for proposer in self._proposers.values():
            if self.step > 0 or cut > 0:
                proposer.moved(max(proposer.cut, cut) if proposer.name != self.settings.freeze else cut)
        self.reducer.carry(self._prefix.carried())
        self._seen.forget(cut)
        self.reducer.observer = self._seen.observer

    def _evidence(self) -> Evidence:
        blocks = range(len(self.chain.blocks))
        previous, current = self._seen.last_two
        return Evidence(
            cut=self.cut,
            num_blocks=len(blocks),
            has_parameters=tuple(bool(self._prefix.trained(b, b + 1)) for b in blocks),
            previous_norms=previous,
            norms=current,
            epoch=self.step / self.cadence.steps_per_epoch,
            num_epochs=self.cadence.epochs,
            warmup_epochs=self.cadence.warmup / self.cadence.steps_per_epoch,
            eta_max=self.settings.eta_max,
        )

    def _vote(self) -> Decision:
        self.average_statistics()
        weight = voting_weight(
            self.settings.vote_weight,
            rank=self.world.rank,
            voter=self.voter,
            mean_loss=self._seen.mean_loss,
            signal_to_noise=self._seen.sums.signal_to_noise(),
        )
        decision = hold_vote(
            self.world,
            self.settings,
            list(self._proposers.values()),
            self._evidence(),
            weight=weight,
            broken=self._seen.broken,
            step=self.step,
            steps_per_epoch=self.cadence.steps_per_epoch,
        )
        for name, outcome in decision.shadow.items():
            if outcome["cut"] != self._proposers[name].cut:
                self._proposers[name].moved(outcome["cut"])
        return decision
