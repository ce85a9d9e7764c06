"""The Freezer: observes training, holds votes of all ranks, and changes the cut on all ranks in the same step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.comm.reducer import Observer, Reducer
from hvfreeze.comm.replica_sync import StatisticsAverage
from hvfreeze.comm.world import World
from hvfreeze.config.freeze import VOTE_WEIGHTS, FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Cadence, epochs_until_move
from hvfreeze.freezing.coherence import Coherence, count_probe_steps, gap
from hvfreeze.freezing.criteria import Evidence, Proposer
from hvfreeze.freezing.frozen_prefix import FrozenPrefix
from hvfreeze.freezing.gradients import GradientSums, Join, Observations
from hvfreeze.freezing.vote import Decision, Voter, hold_vote, voting_weight
from hvfreeze.model.blocks import Chain
from hvfreeze.model.traced import Inputs, in_blocks
from hvfreeze.runs.reading import Move
from hvfreeze.wording import plural


def check_not_tied(chain: Chain, settings: FreezeConfig) -> None:
    """Raise UsageError if freezing is on and the first block shares parameters with the last, which always trains."""
    if chain.tied and settings.freeze != "none":
        raise UsageError(
            f"--freeze ({settings.freeze}) must be none: the first and the last block share {chain.tied[0]}, and "
            "the last block is never frozen"
        )


class Freezer:
    """Decides with all ranks how many front blocks are frozen, and keeps them frozen.

    Args:
        chain: the model in blocks.
        optimizer: any torch optimizer over the chain's parameters; frozen parameters leave its groups. Parameters that
            it does not hold, or that are not trainable now, are ignored at every cut, in the exchange and in votes.
        reducer: exchanges the gradients of the trained blocks.
        world: the ranks that vote.
        settings: criterion, guards, weights and quorum.
        cadence: when votes are held.
        voter: this rank's shard, for weights that depend on it.
        held: the blocks lo..hi-1 of this rank, if the chain is cut over ranks; None is all.
        join: sums the observations of the ranks that hold different blocks; a collective among them.
        work: each block's share of the time of a step, for criteria that use it; empty: equal shares.
        probes_in_steps: whether the backward passes of training probe frozen blocks, as in a user's training loop. If
            not, the caller must call `probe` whenever `needs_probe` is True.

    Attributes:
        step: optimizer steps so far.
        limit: the deepest cut that this rank proposes; None: no limit.
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
        work: Sequence[float] = (),
        probes_in_steps: bool = False,
    ) -> None:
        self.optimizer, self.reducer, self.world = optimizer, reducer, world
        self.settings, self.cadence, self.voter = settings, cadence, voter
        self.step = 0
        self.limit: int | None = None
        self._averaged = 0
        """Number of front blocks that have been frozen since their running statistics were averaged."""
        # A reducer that starts itself is a script's, which may switch requires_grad between steps.
        self.prefix = FrozenPrefix(
            chain,
            optimizer,
            held=held,
            switched=reducer.starts_itself,
            keeps_statistics=settings.statistics == "kept",
        )
        self._proposers = {name: Proposer(name) for name in settings.criteria()}
        watched = {proposer.criterion.watches for proposer in self._proposers.values()}
        source = settings.signal if "norms" in watched or settings.vote_weight == "snr" else "none"
        self._work, self._probes_in_steps = tuple(work), probes_in_steps
        self._coherence = (
            Coherence(self.prefix, optimizer, reducer, every=gap(cadence.interval), join=join)
            if "gains" in watched
            else None
        )
        sums = GradientSums(self.prefix, step_norms=settings.vote_weight == "snr", join=join)
        self._seen = Observations(sums, source)
        check_not_tied(chain, settings)
        self._check_settings(voters="rank" if held is None else "replica")
        self.prefix.on_move(self._follow)
        self._move(settings.cut if settings.cut is not None else 0)
        self.prefix.unseal()

    @property
    def chain(self) -> Chain:
        """The model in blocks."""
        return self.prefix.chain

    @property
    def cut(self) -> int:
        """The number of frozen blocks."""
        return self.prefix.cut

    @property
    def cut_history(self) -> list[Move]:
        """The cut at the start and after every change."""
        return self.prefix.history

    def after_step(self, loss: float, *, scale: float = 1.0) -> Decision | None:
        """Count an optimizer step; at the end of an interval, vote and apply the result.

        Collective: every rank of the world must call this after every step, with its own mean loss. `scale` is the loss
        scale of the backward pass, as of `torch.amp.GradScaler`.

        Returns:
            The decision if a vote was held, else None.

        Raises:
            DivergedError: a frozen parameter or buffer has changed since it was frozen.
        """
        self.prefix.check(step=self.step)
        probed = self.probing
        if probed:
            self.prefix.stop_again()
        decision = self._count_step(loss, scale=scale, probed=probed)
        self._reach_frozen()
        return decision

    def _count_step(self, loss: float, *, scale: float, probed: bool) -> Decision | None:
        self.step += 1
        if len(self.chain.blocks) < 2:
            return None
        self._seen.add_step(loss, self.prefix.carried)
        if self._coherence is not None:
            self._coherence.end_step(scale=scale)
        if not self._proposers or not self.cadence.ends_interval(self.step):
            return None
        average = self._begin_average() if self.cadence.votes(self.step) else None
        # This overlaps the first message of the average; the vote overlaps the second.
        self._seen.end_interval()
        if self._coherence is not None:
            if probed:
                self._coherence.end_probe()
            self._coherence.end_interval()
        for proposer in self._proposers.values():
            proposer.intervals += 1
        if average is None:
            self._begin_interval()
            return None
        average.go_on()
        decision = self._vote()
        self._begin_interval()
        self._end_average(average)
        if decision.moved:
            self._move(decision.cut_after)
        return decision

    @property
    def needs_probe(self) -> bool:
        """Whether frozen blocks must be probed before this step is counted; equal on all ranks."""
        return not self._probes_in_steps and self._probes_within(1)

    @property
    def probing(self) -> bool:
        """Whether the backward pass of the next step reaches frozen blocks, to probe them; equal on all ranks."""
        return self._coherence is not None and self._coherence.probing

    def _probes_within(self, steps: int) -> bool:
        """Return True if a vote that needs a probe of frozen blocks comes within `steps` steps."""
        seen, decides = self._coherence, self.settings.freeze == "coherence"
        end = self.cadence.next_end(self.step)
        near = end - self.step <= steps and self.cadence.votes(end)
        return seen is not None and decides and near and seen.probe_is_due

    def _reach_frozen(self) -> None:
        """Make the backward pass of the next step reach frozen blocks, if it is a probing step."""
        if self._coherence is not None and self._probes_in_steps:
            self._coherence.probing = self._probes_within(count_probe_steps(self.cadence.interval))
            if self._coherence.probing:
                self.prefix.reach(self._coherence.take)

    def probe(self, losses: Iterable[Tensor]) -> None:
        """Probe the frozen blocks for the next vote; see `Coherence.probe`. Not a collective."""
        assert self._coherence is not None
        self._coherence.probe(losses)

    def follow_cadence(self, cadence: Cadence) -> None:
        """Use another cadence from the next step on; the current interval starts again."""
        self.cadence = cadence
        if self._coherence is not None:
            self._coherence.every = gap(cadence.interval)
        if self.step:
            self._begin_interval()

    def freeze(self, cut: int) -> None:
        """Freeze exactly the first `cut` blocks from now on, without a vote. Collective.

        Raises:
            UsageError: `cut` is out of range.
        """
        self.prefix.refuse(cut)
        self.average_statistics()
        self._move(cut)
        self._begin_interval()

    def thaw(self, cut: int) -> None:
        """Unfreeze the blocks from `cut` on, with new optimizer state. Collective.

        Raises:
            UsageError: `cut` is deeper than the current cut, or out of range.
        """
        if cut > self.cut:
            raise UsageError(
                f"thaw(): cut ({cut}) must not be deeper than the current cut {self.cut}; call freeze({cut}) "
                "to freeze more"
            )
        self.freeze(cut)

    @property
    def epochs_left(self) -> float:
        """Epochs until training ends; infinity if unknown."""
        return self.cadence.epochs - self.cadence.epochs_in(self.step)

    def epochs_until_move(self) -> float:
        """Return the expected epochs until the cut changes, infinity if it is fixed."""
        proposer = self._proposers.get(self.settings.freeze)
        if proposer is None:
            return math.inf
        return epochs_until_move(self.cadence, proposer, self._evidence(), step=self.step, history=self.cut_history)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's freezing state: cut, history, position in the interval, accumulators."""
        return {
            "step": self.step,
            "cut": self.cut,
            "cut_history": [list(move) for move in self.cut_history],
            "averaged": self._averaged,
            "tracks": {name: proposer.state() for name, proposer in self._proposers.items()},
            **self._seen.state_dict(),
            **({} if self._coherence is None else {"coherence": self._coherence.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of the same rank; call it before the optimizer's own `load_state_dict`."""
        self.step = state["step"]
        self.prefix.restore([Move(*entry) for entry in state["cut_history"]])
        # States for a job of another size lack this and the observations; earlier checkpoints lack this.
        self._averaged = state.get("averaged", 0)
        known = self._proposers
        known.update({name: Proposer(name, *values) for name, values in state["tracks"].items() if name in known})
        if "sums" in state:
            self._seen.load_state_dict(state)
        else:
            self._begin_interval()
        if self._coherence is not None and "coherence" in state:
            self._coherence.load_state_dict(state["coherence"])
        self.prefix.unseal()
        self._reach_frozen()

    @staticmethod
    def redealt(state: dict[str, Any], *, restep: Callable[[int], int]) -> dict[str, Any]:
        """Convert a rank's state to a job of another size; `restep` maps step numbers.

        Its ranks own other samples, so the observations of this job's ranks are dropped.
        """
        moves = [Move(*entry) for entry in state["cut_history"]]
        forgetful = {name: Proposer(name) for name in state["tracks"]}
        for name, (cut, *_) in state["tracks"].items():
            forgetful[name].moved(cut)
        peaks = {"coherence": {"peaks": state["coherence"]["peaks"]}} if "coherence" in state else {}
        return {
            "step": restep(state["step"]),
            "cut": state["cut"],
            "cut_history": [list(move._replace(step=restep(move.step))) for move in moves],
            "tracks": {name: proposer.state() for name, proposer in forgetful.items()},
            **peaks,
        }

    def average_statistics(self) -> None:
        """Average running statistics over ranks; frozen ones keep their bits. Collective."""
        self._end_average(self._begin_average())

    def _check_settings(self, *, voters: str) -> None:
        self.prefix.refuse(self.settings.cut or 0)
        if self._proposers and self.settings.vote_weight not in VOTE_WEIGHTS:
            count = len(self.settings.vote_weight.split(","))
            if count != self.world.size:
                raise UsageError(
                    f"--vote-weight ({self.settings.vote_weight}) has {plural(count, 'number')}; it must have one "
                    f"for each of the {self.world.size} {voters}s"
                )

    def _begin_average(self) -> StatisticsAverage:
        """Start to average the running statistics that may differ between ranks. Collective."""
        return StatisticsAverage(self.chain.modules(self._averaged), self.world)

    def _end_average(self, average: StatisticsAverage) -> None:
        """Write the averages. Collective."""
        self.reducer.other_bytes += average.finish()
        self._averaged = self.cut
        self.prefix.seal()

    def _move(self, cut: int) -> None:
        """Freeze exactly the first `cut` blocks; except at the start, call it after averaging their statistics."""
        self._averaged = cut if self.cut_history else 0
        self.prefix.move(Move(self.cadence.epoch(self.step), self.step, cut))

    def _follow(self) -> None:
        """Reset observations of the previous cut, and exchange the gradients of the blocks that train now."""
        cut = self.cut
        for proposer in self._proposers.values():
            if self.step > 0 or cut > 0:
                proposer.moved(max(proposer.cut, cut) if proposer.name != self.settings.freeze else cut)
        self.reducer.carry(self.prefix.carried())
        self._seen.forget()
        self.reducer.observer, self.reducer.on_wait, self.reducer.on_average = None, None, None
        if len(self.chain.blocks) < 2:
            return  # nothing will ever be frozen
        self.reducer.observer = self._seen.observer
        self.reducer.on_wait = self._square_ahead if self._seen.observer is not None else None
        if self._coherence is not None:
            self._coherence.follow()
            self.reducer.observer = both(self._seen.observer, self._coherence.observe)
            self.reducer.on_average = self._coherence.compare

    def _square_ahead(self) -> None:
        """If an interval ends with this step, compute its squared norms during the exchange. Not a collective."""
        if self._proposers and self.cadence.ends_interval(self.step + 1):
            self._seen.sums.squares()

    def _begin_interval(self) -> None:
        self._seen.begin_interval()
        if self._coherence is not None:
            self._coherence.restart()

    def _evidence(self) -> Evidence:
        count = len(self.chain.blocks)
        trained = [block for block in range(self.cut, count) if self._trains(block)]
        previous, current = self._seen.last_two
        return Evidence(
            cut=self.cut,
            num_blocks=count,
            has_parameters=tuple(block < self.cut or block in trained for block in range(count)),
            previous_norms=previous,
            norms=current,
            epoch=self.cadence.epochs_in(self.step),
            num_epochs=self.cadence.epochs,
            warmup_epochs=self.cadence.epochs_in(self.cadence.warmup),
            eta_max=self.settings.eta_max,
            gains=None if self._coherence is None else self._coherence.gains,
            probes=() if self._coherence is None else tuple(self._coherence.probes),
            peaks=() if self._coherence is None else tuple(self._coherence.peaks),
            work=self._work,
            min_gain=self.settings.min_gain,
            limit=self._deepest(trained),
        )

    def _deepest(self, trained: Sequence[int]) -> int:
        """Return the deepest cut within the limit with a `trained` block behind it, because a loss needs a gradient."""
        last = trained[-1] if trained else self.cut
        return last if self.limit is None else min(self.limit, last)

    def _trains(self, block: int) -> bool:
        return any(parameter.requires_grad for _, parameter in self.prefix.trained(block, block + 1))

    def _vote(self) -> Decision:
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
            epoch=self.cadence.epoch(self.step),
        )
        for name, outcome in decision.shadow.items():
            if outcome["cut"] != self._proposers[name].cut:
                self._proposers[name].moved(outcome["cut"])
        return decision


def both(first: Observer | None, second: Observer) -> Observer:
    """Return a function that passes gradients to two observers, the first of which may be None."""

    def observe(slot: int, gradient: Tensor) -> None:
        if first is not None:
            first(slot, gradient)
        second(slot, gradient)

    return observe


def freeze_by_vote(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    steps_per_epoch: int,
    num_epochs: int,
    settings: FreezeConfig = FreezeConfig(freeze="coherence"),  # noqa: B008  (frozen)
    blocks: str | None = None,
    example: Inputs | None = None,
) -> Freezer:
    """Return a Freezer for `model`; votes are held twice an epoch, from the end of the first epoch on.

    Its `reducer` averages the gradients. For more options, create `Chain`, `Reducer` and `Freezer` directly.

    Args:
        model: any module.
        optimizer: any torch optimizer over its parameters.
        world: the ranks that vote.
        steps_per_epoch: optimizer steps per epoch of each rank.
        num_epochs: length of training.
        settings: criterion, guards, weights and quorum.
        blocks: where the model may be cut, see `in_blocks`.
        example: a batch of the model's inputs; needed unless the model is a torchvision classifier or an nn.Sequential,
            or `blocks` names its blocks.

    Raises:
        UsageError: the settings do not fit the model or the world, or the model cannot be divided this way.
    """
    settings = settings.of_script()
    return Freezer(
        in_blocks(model, blocks=blocks, example=example),
        optimizer=optimizer,
        reducer=Reducer(world),
        world=world,
        settings=settings,
        cadence=Cadence.of(settings, steps_per_epoch=steps_per_epoch, num_epochs=num_epochs),
        probes_in_steps=True,
    )
