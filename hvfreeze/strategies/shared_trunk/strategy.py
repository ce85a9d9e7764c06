"""Several models fine-tuned at once on one frozen trunk; no parameter and no gradient ever travels.

    line (trunk segments on different ranks) -> features -> each rank's own heads: loss -> backward -> update

All ranks meet the same batches: they are one replica. A model lives on one rank, its trunk on all of them.
Source: McNeela, Patel, Gupta: "Efficient Distributed Transfer Learning Using Pipelined Model Parallelism".
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.segments import Segment, segment_bytes, tensors_of
from hvfreeze.data.batches import Batch
from hvfreeze.errors import DivergedError, NumericsError, RefusedError
from hvfreeze.freezing.frozen import Seal
from hvfreeze.ranks.agreement import gather_tensors
from hvfreeze.ranks.machine.memory import end_set_up, give_back
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.runs.moves import Move
from hvfreeze.strategies.shared_trunk.account import Facts, share_of, together_of
from hvfreeze.strategies.shared_trunk.features import TrunkFeatures
from hvfreeze.strategies.shared_trunk.heads import Head
from hvfreeze.strategies.shared_trunk.line import LANES
from hvfreeze.strategies.strategy import Answers, State, StepResult, WholeModel


class SharedTrunk:
    """Trains this rank's heads; see `Strategy` for what its methods promise.

    Args:
        facts: what all ranks know.
        chain: the model in blocks, of which this rank holds its segment of the trunk alone.
        segment: the blocks that it holds.
        heads: this rank's, in the order of the tasks.
        training: the trunk's output for training batches.
        evaluation: the same for evaluation batches.
        world: all ranks.
        clock: where the seconds of a step go.
        settle_in: called once before the first epoch, when the run directory is there: opens what is stored while the
            whole trunk is at hand to compare it with, and lets go of the segments that other ranks hold. A collective.
    """

    def __init__(
        self,
        facts: Facts,
        chain: Chain,
        segment: Segment,
        heads: Sequence[Head],
        training: TrunkFeatures,
        evaluation: TrunkFeatures,
        *,
        world: World,
        clock: PhaseClock,
        settle_in: Callable[[], None],
    ) -> None:
        self.facts, self.chain, self.segment, self.heads = facts, chain, segment, heads
        self.training, self.evaluation, self.world, self.clock = training, evaluation, world, clock
        self._settle_in: Callable[[], None] | None = settle_in
        self._steps, self._signal_bytes = 0, 0
        self._before: dict[str, int] = {}
        self._seal = Seal([*chain.named_parameters(*segment), *chain.named_buffers(*segment)])

    @property
    def cut(self) -> int:
        """Blocks that are frozen in every model."""
        return self.facts.cut

    @property
    def models(self) -> Sequence[str]:
        """One a task."""
        return [f"model-{name}" for name in self.facts.names]

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Get ready for these batches."""
        if self._settle_in is not None:
            self._settle_in()
            self._settle_in = None
            end_set_up()
        (self.training if training else self.evaluation).begin_epoch(batches)

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Train every head of this rank on the one batch, while the line works on those to come."""
        (batch,), clock = batches, self.clock
        served = self.training.of(batch)
        labels = self._labels(batch, training=True) if served.labels is None else served.labels
        losses: dict[str, float] = {}
        answers: dict[str, Answers] = {}
        for head, right in zip(self.heads, labels, strict=True):
            name = f"model-{head.task.name}"
            losses[name], answers[name] = head.train(served.features[head.depth], right, clock)
        broken = [name for head, (name, loss) in zip(self.heads, losses.items()) if not head.is_finite(loss)]

        # All ranks: two numbers, and no parameter.
        clock.enter("allreduce")
        signals = torch.tensor([len(broken), int(leave)], dtype=torch.int32)
        num_broken, num_leaving = self.world.allreduce_sum(signals, name="trunk.signals").tolist()
        self._signal_bytes += signals.nbytes if self.world.size > 1 else 0
        if num_broken:
            self._stop(broken)

        clock.enter("optimizer")
        for head in self.heads:
            head.update(rate)
        self._seal.check(step=self._steps)
        self._steps += 1
        if num_leaving:
            self.training.finish()
        clock.enter("data")
        return StepResult(losses=losses, answers=answers, leave=bool(num_leaving))

    def settle(self) -> None:
        """Return at once: each model lives on one rank, and is what it is."""

    def predict(self, batch: Batch) -> dict[str, Answers]:
        """Return what this rank's models say of an evaluation batch. Collective: all ranks ask for the same batches."""
        served = self.evaluation.of(batch)
        rows = self._labels(batch, training=False)
        return {
            f"model-{head.task.name}": Answers(head.predict(served.features[head.depth]), labels)
            for head, labels in zip(self.heads, rows, strict=True)
        }

    def check(self, *, step: int) -> str:
        """Return a digest over the trunk's blocks and every head, wherever they lie.

        It does not depend on how many ranks there are, nor on how they share the work.
        """
        blocks = {b: digest_tensors(tensors_of(self.chain, (b, b + 1))) for b in range(*self.segment)}
        heads = {head.task.name: digest_tensors(head.tensors()) for head in self.heads}
        everyone = self.world.allgather_object((blocks, heads), name="trunk.digest")
        found: dict[int | str, str] = {}
        for rank, parts in enumerate(everyone):
            for part in parts:
                for key, digest in part.items():
                    if found.setdefault(key, digest) != digest:
                        raise DivergedError(f"block {key} of the trunk on rank {rank} differs after step {step}")
        order = [*range(self.facts.depth), *self.facts.names]
        return hashlib.sha256("\n".join(f"{key} {found[key]}" for key in order).encode()).hexdigest()

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield each model; on rank 0 with the trunk, of which it keeps one copy, and one head at a time."""
        mine = self.segment if self.world.rank == 0 or not self.facts.whole else (0, 0)
        give_back()
        trunk = gather_tensors(self.world, tensors_of(self.chain, mine), name="trunk.model")
        heads = {head.task.name: head for head in self.heads}
        for name, classes in zip(self.facts.names, self.facts.classes, strict=True):
            own = heads[name].tensors() if name in heads else []
            head = gather_tensors(self.world, own, name="trunk.head")
            order = self.chain.model.state_dict() if self.world.rank == 0 else {}
            state = {key: head[key] if key in head else trunk[key] for key in order}
            yield WholeModel(f"model-{name}", state, classes)

    def state_dict(self) -> State:
        """Return this rank's heads; the trunk is not kept, but what it was is."""
        counts = {"forwards": self.training.line.forwards, "signals": self._signal_bytes, **self._bytes_sent()}
        own = {"heads": {head.task.name: head.state_dict() for head in self.heads}, "counts": counts}
        return State({"shared_trunk": self.facts.identity, "steps": self._steps}, own)

    def load_state_dict(self, state: State) -> None:
        """Continue from a state of the same rank.

        Raises:
            RefusedError: it was trained for other tasks, or on another trunk.
        """
        theirs = state.shared["shared_trunk"]
        for key, value in self.facts.identity.items():
            if theirs.get(key) != value:
                raise RefusedError(f"the checkpoint was made with other {key}; put these back, or start anew")
        for head in self.heads:
            head.load_state_dict(state.own["heads"][head.task.name])
        self._steps = state.shared["steps"]
        counts = dict(state.own["counts"])
        self.training.line.forwards, self._signal_bytes = counts.pop("forwards"), counts.pop("signals")
        self._before = counts

    def redealt(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield for each rank the heads that it trains; counts go on with rank 0. Not a collective."""
        heads: dict[str, Any] = {}
        counts: Counter[str] = Counter()
        for own in owns:
            heads |= own["heads"]
            counts.update(own["counts"])
        for rank in range(size):
            mine = {name: heads[name] for name in self.facts.names[rank::size]}
            yield {"heads": mine, "counts": dict(counts) if rank == 0 else dict.fromkeys(counts, 0)}

    def report(self) -> dict[str, Any]:
        """Return what was exchanged, what the cache did, and what each rank had and did."""
        mine = share_of(
            self.training,
            self.evaluation,
            trunk_bytes=segment_bytes(self.chain, self.segment),
            sent=self._bytes_sent(),
            clock=self.clock,
        )
        found = together_of(self.facts, self.world.allgather_object(mine, name="trunk.report"))
        return {"other_collective_bytes": self._signal_bytes, "cut_history": [Move(0, 0, self.cut)], **found}

    def close(self) -> None:
        """Keep what is cached and let go of all files."""
        self.training.close()
        self.evaluation.close()

    def _labels(self, batch: Batch, *, training: bool) -> list[Tensor]:
        return [head.labels.of(batch, training=training) for head in self.heads]

    def _bytes_sent(self) -> dict[str, int]:
        counts = self.training.line.wire.counts
        return {lane: self._before.get(lane, 0) + counts[lane].bytes_sent for lane in LANES}

    def _stop(self, broken: list[str]) -> None:
        """Raise on all ranks."""
        self.training.finish()
        names = [n for theirs in self.world.allgather_object(broken, name="trunk.broken") for n in theirs]
        raise NumericsError(
            f"step {self._steps}: the loss or the gradients of {', '.join(names)} are not finite; no update was made; "
            "lower --lr or add --lr-warmup, and go on from the last checkpoint"
        )
