"""Local critics: trains the layer groups of a model at once, each with the loss that its critic predicts.

    rank p, batch t:  input -> forward -> send the output on -> critic -> send its losses back -> backward -> update

Only losses are sent back, so no group waits for the backward pass of a later one: ranks work on different batches, the
first ones ahead. Every rank makes the same steps in the same order, so the result has the bits of one process. Source:
Lee et al., "Local Critic Training for Model-Parallel Learning of Deep Neural Networks", arXiv 1805.01128.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.comm.agreement import synchronize_in_rounds
from hvfreeze.data.batches import Batch
from hvfreeze.errors import NumericsError, RefusedError
from hvfreeze.freezing.frozen_prefix import Seal
from hvfreeze.model.early_exits import EarlyExits, first_sure
from hvfreeze.model.segments import tensors_of
from hvfreeze.prefix.features import Features, Halves
from hvfreeze.runs.reading import Move
from hvfreeze.strategies.base import MODEL, Answers, State, StepResult, WholeModel
from hvfreeze.strategies.local_critics.group import LayerGroup
from hvfreeze.strategies.local_critics.line import EVALUATION, LANES, Line, batches_ahead
from hvfreeze.strategies.model_parallel import SplitStrategy, block_digests, optimizer_bytes
from hvfreeze.tasks import classes_of
from hvfreeze.wording import plural


@dataclass(frozen=True, kw_only=True)
class CriticFacts:
    """Facts of the run that are equal on all ranks."""

    cut: int
    """Frozen blocks; they belong to the first group."""
    critic_every: int
    """Critics learn from every K-th batch, beginning with the first."""
    placed: Callable[[int], Sequence[tuple[int, int]]]
    """Groups lo..hi-1 of each rank, by number of ranks."""


@dataclass
class StepCount:
    """Number of steps made."""

    steps: int = 0


class Signal(NamedTuple):
    """A pending exchange of a step's signals."""

    step: int
    numbers: Tensor
    """Number of ranks with NaN or Inf, and number of ranks asked to leave."""
    handle: Any


@dataclass(eq=False, kw_only=True)
class LocalCritics(SplitStrategy):
    """Trains this rank's groups; see `Strategy` for its methods."""

    facts: CriticFacts
    exits: EarlyExits
    """The whole model; this rank has only the tensors of its own groups."""
    groups: Sequence[LayerGroup]
    """This rank's groups."""
    training: Line
    evaluation: Line
    features: tuple[Features, Features] | None
    """On the first rank: the pipeline's input, in training and in evaluation."""
    counts: ExitCounts
    halves: Halves
    done: StepCount
    _began: bool = False
    _signals: deque[Signal] = field(default_factory=deque)
    _leaving: bool = False
    _broken: bool = False
    """True after NaN or Inf in a loss or gradient of this rank: it makes no more updates."""
    _unlearnt: int | None = None
    """The batch whose next losses this rank's last critic has not learned from yet."""
    _coming: int = 0
    """Batches of the epoch that have not entered the pipeline."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seal_frozen()

    @property
    def cut(self) -> int:
        """The number of frozen blocks."""
        return self.facts.cut

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Prepare for these batches. Collective."""
        self._finish_learning()
        if training:
            self._coming = len(batches)
        else:
            self.counts.begin()

        def begin() -> Iterator[None]:
            if self.features is None:
                return
            if not self._began:
                # Not earlier: only now the run directory exists and the model has its initial state.
                for features in self.features:
                    features.move((self.cut,))
            yield from self.features[0 if training else 1].beginning_epoch(batches)

        # The first rank may have many rows to compute, and the others none.
        synchronize_in_rounds(self.world, begin(), name="critics.epoch")
        self._began = True

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Train this rank's groups on one batch. Front ranks are some steps ahead. Collective."""
        (batch,), clock, line, number = batches, self.clock, self.training, self.done.steps
        self._hear(ahead=batches_ahead(self.world.size) - 1)
        learns = number % self.facts.critic_every == 0
        clock.enter("forward")
        self.halves.be_in_mode(training=True)
        x = line.input(number, lambda: self._load(batch, training=True))
        self._coming -= 1
        if self._coming > 0 and not self._leaving:
            # Only if another batch follows.
            line.expect_input(number + 1)
        before: LayerGroup | None = None
        for group in self.groups:
            clock.enter("forward")
            x = group.forward(x)
            if group is self.groups[-1]:
                line.pass_on(x, number)
                self._finish_learning()
            losses = group.estimate(batch.labels, batch.ids)
            if learns and before is None:
                line.hand_back(losses, number)
            elif learns and before is not None:
                before.learn(losses)
            clock.enter("backward")
            group.backward()
            clock.enter("optimizer")
            self._broken = self._broken or not group.is_finite(group.loss)
            if not self._broken:
                group.update(rate)
            before = group
        last = self.groups[-1]
        if learns and line.after is not None:
            self._unlearnt = number
        self._frozen.check(step=number)
        self.done.steps += 1
        self._tell(number, leave=leave)
        clock.enter("allreduce")
        if self.world.size == 1:
            self._hear(ahead=0)
        clock.enter("data")
        answers = {MODEL: Answers(last.logits, batch.labels)} if line.after is None else {}
        return StepResult(losses={MODEL: last.loss}, answers=answers, leave=self._leaving)

    def settle(self) -> None:
        """Complete the critics' pending updates, and receive all signals. Collective.

        Raises:
            NumericsError: NaN or Inf in a loss or gradient of an earlier step; on all ranks.
        """
        self._finish_learning()
        self._hear(ahead=0)

    def predict(self, batch: Batch) -> Mapping[str, Answers]:
        """Return the answers on the last rank, and count those of all exits there. Collective."""
        line = self.evaluation
        self.halves.be_in_mode(training=False)
        x = line.input(0, lambda: self._load(batch, training=False))
        logits = []
        with torch.no_grad():
            for group in self.groups:
                x = self.halves.prefix(x, group.plan.start, group.plan.blocks[1])
                logits.append(group.answer(x))
        # So that no rank is more than a batch ahead.
        line.wire.drain()
        line.pass_on(x, 0)
        found = line.gather(logits)
        if not found:
            return {}
        self.counts.add([each[: batch.counted] for each in found], batch.labels[: batch.counted])
        return {MODEL: Answers(found[-1], batch.labels)}

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield the model with its critics, gathered on rank 0. Collective."""
        starts = tuple(start for start, _ in self.exits.groups[1:])
        for whole in super().whole_models():
            yield whole._replace(exits=starts)

    def state_dict(self) -> State:
        """Return this rank's groups, whose pending updates must be complete."""
        self._finish_learning()
        own = {
            "groups": {group.plan.number: group.state_dict() for group in self.groups},
            "counts": self._counts(LANES),
        }
        return State({"local_critics": self._identity(), "steps": self.done.steps}, own)

    def load_state_dict(self, state: State) -> None:
        """Load a state of the same groups.

        Raises:
            RefusedError: it is of other groups.
        """
        theirs = state.shared["local_critics"]
        if theirs != self._identity():
            raise RefusedError(
                f"the checkpoint has layer groups {theirs}, but this run has {self._identity()}; "
                "resume with the settings of the checkpoint"
            )
        for group in self.groups:
            group.load_state_dict(state.own["groups"][group.plan.number])
        self.done.steps = state.shared["steps"]
        self._count_on(state.own["counts"])
        self._seal_frozen()

    def repartitioned(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield for each rank its groups; counts continue on rank 0. Not a collective."""
        groups: dict[int, Any] = {}
        counts: Counter[str] = Counter()
        for own in owns:
            groups |= own["groups"]
            counts.update(own["counts"])
        for rank, (start, stop) in enumerate(self.facts.placed(size)):
            local = {number: groups[number] for number in range(start, stop)}
            yield {"groups": local, "counts": dict(counts) if rank == 0 else {}}

    def report(self) -> dict[str, Any]:
        """Return the exchanged bytes, each rank's resource use, and the accuracy of exits. Collective."""
        local = {
            "signal_bytes": self.signal_bytes,
            "parameter_bytes": sum(tensor.nbytes for _, tensor in self._tensors()),
            "optimizer_bytes": sum(optimizer_bytes(each.optimizer, each.critic_optimizer) for each in self.groups),
            "cache": None if self.features is None else self.features[0].report(),
            "exits": self.counts.summary(),
        }
        ranks, sent = self._numbers_of_ranks(local, LANES)
        return {
            "cut_history": [Move(0, 0, self.cut)],
            "allreduce_bytes": 0,
            "other_collective_bytes": max(ranks.pop("signal_bytes")),
            "cache": ranks.pop("cache")[0],
            "critics": {
                "groups": [list(group) for group in self.exits.groups],
                "groups_by_rank": [list(groups) for groups in self.training.plan.ranks],
                "critic_every": self.facts.critic_every,
                **ranks.pop("exits")[-1],
                "wire_bytes": {lane: sent[lane] for lane in LANES},
                "evaluation_wire_bytes": sum(sent[lane] for lane in EVALUATION),
                **ranks,
            },
        }

    def close(self) -> None:
        """Publish cached rows and close all files."""
        for features in self.features or ():
            features.close()

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [pair for group in self.groups for pair in group.tensors()]

    def _digests(self) -> Mapping[tuple[str, int], str]:
        local: dict[tuple[str, int], str] = {}
        for group in self.groups:
            digests = block_digests(self.chain, range(*group.plan.blocks))
            local |= {("block", block): digest for block, digest in digests.items()}
            critic = [] if group.critic is None else list(group.critic.named_parameters())
            local["critic", group.plan.number] = digest_tensors(critic)
        return local

    def _seal_frozen(self) -> None:
        self._frozen = Seal(tensors_of(self.chain, (0, self.cut)) if self.training.before is None else [])

    def _load(self, batch: Batch, *, training: bool) -> Tensor:
        assert self.features is not None, "batches enter the pipeline on the first rank"
        return self.features[0 if training else 1].of(batch)

    def _finish_learning(self) -> None:
        """Train this rank's last critic on the last batch, when the next rank has its losses."""
        if self._unlearnt is not None:
            self.groups[-1].learn(self.training.losses(self._unlearnt))
            self._unlearnt = None

    def _tell(self, step: int, *, leave: bool) -> None:
        """Start to send the signals of this step to all ranks."""
        numbers = torch.tensor([int(self._broken), int(leave)], dtype=torch.int32)
        # One name for each signal that may be pending at the same time.
        name = f"critics.signals.{step % (batches_ahead(self.world.size) + 1)}"
        self._signals.append(Signal(step, numbers, self.world.start_allreduce_(numbers, name=name)))
        self.signal_bytes += numbers.nbytes if self.world.size > 1 else 0

    def _hear(self, *, ahead: int) -> None:
        """Receive signals except those of the last `ahead` steps; stop on all ranks if one must."""
        while len(self._signals) > max(0, ahead):
            step, numbers, handle = self._signals.popleft()
            with self.clock.within("allreduce"):
                self.world.wait(handle)
            broken, leaving = numbers.tolist()
            self._leaving = self._leaving or bool(leaving)
            if broken:
                self._stop(step, broken)

    def _stop(self, step: int, broken: int) -> None:
        """Raise NumericsError on all ranks, after completing all messages."""
        self._finish_learning()
        for signal in self._signals:
            self.world.wait(signal.handle)
        self._signals.clear()
        raise NumericsError(
            f"step {step}: NaN or Inf in a loss or gradient on {broken} of {plural(self.world.size, 'rank')}; later "
            "updates are invalid; lower --lr, or add --lr-warmup or --clip-grad, and resume from the last "
            "checkpoint"
        )

    def _identity(self) -> dict[str, Any]:
        return {"groups": [list(group) for group in self.exits.groups], "cut": self.cut}


CONFIDENCE = 0.9
"""Confidence at which a sample takes an early exit, for a run's report."""


@dataclass
class ExitCounts:
    """Sums over samples, on the rank with the logits of all exits.

    Args:
        work: floating-point operations of every exit, see `work_until`.
        whole: operations of the model without critics.
    """

    work: Sequence[int]
    whole: int
    samples: int = 0
    correct: list[int] = field(default_factory=list)
    """Correct samples by exit."""
    ensemble: int = 0
    """Samples that the mean of all exits' probabilities classifies correctly."""
    left: list[int] = field(default_factory=list)
    """Samples that leave at each exit."""
    early: int = 0
    """Samples that are correct at the exit where they leave."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset all counts."""
        self.samples = self.ensemble = self.early = 0
        self.correct, self.left = [0] * len(self.work), [0] * len(self.work)

    def add(self, logits: Sequence[Tensor], labels: Tensor) -> None:
        """Count the logits, (B, classes), of every exit for samples with labels (B,)."""
        probabilities = torch.stack(list(logits)).softmax(2)
        leaves = first_sure(probabilities, CONFIDENCE)
        answers = torch.stack([classes_of(each) for each in probabilities])
        for number, each in enumerate(answers):
            self.correct[number] += int((each == labels).sum())
            self.left[number] += int((leaves == number).sum())
        self.ensemble += int((classes_of(probabilities.mean(0)) == labels).sum())
        self.early += int((answers.gather(0, leaves[None])[0] == labels).sum())
        self.samples += len(labels)

    def summary(self) -> dict[str, Any]:
        """Return accuracies and shares, 0-1; empty without evaluations."""
        if not self.samples:
            return {}
        parts = [count / self.samples for count in self.left]
        return {
            "exit_accuracy": [count / self.samples for count in self.correct],
            "ensemble_accuracy": self.ensemble / self.samples,
            "exit_confidence": CONFIDENCE,
            "early_accuracy": self.early / self.samples,
            "samples_by_exit": parts,
            "flops_by_exit": [work / max(1, self.whole) for work in self.work],
            "early_flops": sum(part * work for part, work in zip(parts, self.work)) / max(1, self.whole),
        }
