"""One unmodified model on P x R ranks: cut into P partitions, in R replicas, with exact gradients.

    line: micro-batches forward, errors back -> each partition's gradients averaged over its replicas -> update -> vote

P = 1 is data parallelism, R = 1 model parallelism, anything else both at once. Every rank holds its own blocks alone,
with their optimizer state. Source: Awan et al., "HyPar-Flow", ISC 2020, arXiv 1911.05146.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.chain.segments import Segment, drop_tensors, tensors_of
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.data.batches import Batch, announce
from hvfreeze.data.decoding import Images
from hvfreeze.errors import DivergedError, RefusedError
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.ranks.agreement import gather_tensors
from hvfreeze.ranks.machine.share import forget_peak_memory
from hvfreeze.ranks.mesh import Mesh
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.grid.account import Facts, share_of, together_of
from hvfreeze.strategies.grid.agreement import Agreement, clip
from hvfreeze.strategies.grid.pipeline import Pipeline
from hvfreeze.strategies.grid.state import put_back, redealt, state_of
from hvfreeze.strategies.strategy import MODEL, Answers, State, StepResult, WholeModel
from hvfreeze.updates.update import Update

OpenFreezer = Callable[[Segment], Freezer]
"""Blocks -> what trains them on this rank, with an optimizer, a reducer and no state."""


class Grid:
    """Trains this rank's blocks; see `Strategy` for what its methods promise.

    Args:
        facts: what all ranks know.
        mesh: this rank's place.
        training: this rank's part in its line.
        evaluation: the same for evaluation batches.
        images: of both, in this order; read by the first partition alone.
        open_freezer: called with the blocks that this rank holds.
        settings: how parameters are updated.
        world: all ranks.
        clock: where the seconds of a step go.
    """

    def __init__(
        self,
        facts: Facts,
        mesh: Mesh,
        training: Pipeline,
        evaluation: Pipeline,
        images: tuple[Images, Images],
        *,
        open_freezer: OpenFreezer,
        settings: OptimizerConfig,
        world: World,
        clock: PhaseClock,
    ) -> None:
        self.facts, self.mesh, self.training, self.evaluation = facts, mesh, training, evaluation
        self.images, self.world, self.clock = images, world, clock
        self.chain = training.halves.chain
        self._open_freezer = open_freezer
        self._settings = settings
        self._agreement = Agreement(world, replicas=mesh.replicas, clips=settings.clip_grad is not None)
        self._before: dict[str, int] = {}
        self._cpu_start = time.process_time()
        self._trained = [parameter for _, parameter in self.chain.named_parameters() if parameter.requires_grad]
        self.freezer = self._hold(training.plan.segments, {})
        forget_peak_memory()

    @property
    def cut(self) -> int:
        """Number of frozen blocks."""
        return self.freezer.cut

    @property
    def models(self) -> Sequence[str]:
        """The one model."""
        return (MODEL,)

    @property
    def segment(self) -> Segment:
        """The blocks that this rank holds."""
        return self.training.segment

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Get ready for these batches."""
        if self.mesh.before is None:
            announce(self.images[0 if training else 1], batches)

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Send batches through the line and back, average gradients over replicas, and update this rank's blocks."""
        clock, reducer = self.clock, self.freezer.reducer
        clock.enter("forward")
        self.training.halves.be_in_mode(training=True)
        reducer.begin(passes=len(batches) * self.facts.micro_batches)
        learnt = self.training.train(batches, cut=self.cut)
        clock.enter("allreduce")
        reducer.finish()
        # All ranks: whether to go on, and the norm of all gradients.
        loss = learnt.loss if learnt else None
        agreed = self._agreement.reach(loss, reducer, leave=leave, step=self.freezer.step)

        clock.enter("optimizer")
        clip(reducer, norm=agreed.norm, most=self._settings.clip_grad)
        self._update.make(rate)

        # All ranks, at the end of an interval: the vote, and the same cut in the same step.
        clock.enter("vote")
        decision = self.freezer.after_step(0.0 if loss is None else loss)
        if decision is not None:
            self._agreement.check_cut(self.cut, step=self.freezer.step)
        clock.enter("data")
        losses = {MODEL: agreed.loss if loss is None else loss}
        answers = {MODEL: learnt.answers} if learnt else {}
        return StepResult(losses=losses, answers=answers, leave=agreed.leave, decision=decision)

    def settle(self) -> None:
        """Average the running statistics over the replicas of each partition."""
        self.freezer.average_statistics()

    def predict(self, batch: Batch) -> Mapping[str, Answers]:
        """Return on the last partition what the model says. Collective among the ranks of a line."""
        self.training.halves.be_in_mode(training=False)
        logits = self.evaluation.answer(batch)
        return {} if logits is None else {MODEL: Answers(logits, batch.labels)}

    def check(self, *, step: int) -> str:
        """Return a digest over all blocks, which does not depend on where they are cut; raise where replicas differ."""
        mine = {block: digest_tensors(tensors_of(self.chain, (block, block + 1))) for block in range(*self.segment)}
        everyone = self.world.allgather_object(mine, name="grid.digest")
        found: dict[int, str] = {}
        for rank, digests in enumerate(everyone):
            for block, digest in digests.items():
                if found.setdefault(block, digest) != digest:
                    other = next(r for r, theirs in enumerate(everyone) if block in theirs)
                    raise DivergedError(
                        f"block {self.chain.blocks[block].name} differs between ranks {other} and {rank} after step "
                        f"{step}; parameters must change by updates only"
                    )
        return hashlib.sha256("\n".join(found[block] for block in sorted(found)).encode()).hexdigest()

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield the model, put together on rank 0 from the ranks of its line."""
        mine = self.segment if self.mesh.replica == 0 else (0, 0)
        found = gather_tensors(self.world, tensors_of(self.chain, mine), name="grid.model")
        order = self.chain.model.state_dict() if self.world.rank == 0 else {}
        yield WholeModel(MODEL, {name: found[name] for name in order})

    def state_dict(self) -> State:
        """Return this rank's blocks with their optimizer state; a checkpoint holds a copy of each replica's."""
        own = {
            "grid": {**self.facts.identity(), "segments": [list(segment) for segment in self.training.plan.segments]},
            **state_of(self.freezer, self.segment),
            "signals": self._agreement.bytes,
            "sent": self._bytes_sent(),
        }
        return State({}, own)

    def load_state_dict(self, state: State) -> None:
        """Continue from a state of the same rank, with the chain cut where it was cut then.

        Raises:
            RefusedError: it is the state of another grid.
        """
        own = state.own
        theirs = dict(own["grid"])
        segments = tuple((start, stop) for start, stop in theirs.pop("segments"))
        if theirs != self.facts.identity():
            raise RefusedError(f"the checkpoint is of a grid of {theirs}, and this is one of {self.facts.identity()}")
        self.freezer.reducer.carry([])
        for parameter in self._trained:
            parameter.requires_grad_(True)
        self.freezer = self._hold(segments, own["tensors"])
        put_back(own, self.freezer, self.segment)
        self._agreement.bytes = own["signals"]
        counts = self.training.wire.counts
        self._before = {lane: sent - counts[lane].bytes_sent for lane, sent in own["sent"].items()}

    def redealt(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield for each rank of this grid the blocks that it holds now. Not a collective."""
        sent: Counter[str] = Counter()

        def counted() -> Iterator[dict[str, Any]]:
            for own in owns:
                sent.update(own["sent"])
                yield own

        segments = self.training.plan.segments
        each = [segments[rank % len(segments)] for rank in range(size)]
        grid = {**self.facts.identity(), "segments": [list(segment) for segment in segments]}
        for rank, state in enumerate(redealt(counted(), self.chain, each, restep=restep)):
            own = {"sent": dict(sent) if rank == 0 else dict.fromkeys(sent, 0), "signals": 0}
            yield {"grid": grid, **state, **own}

    def report(self) -> dict[str, Any]:
        """Return the cut's history, what was exchanged, and what each rank had and did."""
        mine = share_of(
            self.freezer,
            tensors_of(self.chain, self.segment),
            sent=self._bytes_sent(),
            counts=self.training.wire.counts,
            cpu_seconds=time.process_time() - self._cpu_start,
            signal_bytes=self._agreement.bytes,
        )
        shares = self.world.allgather_object(mine, name="grid.report")
        return {
            "cut_history": self.freezer.cut_history,
            **together_of(self.facts, self.training.plan.segments, shares),
        }

    def close(self) -> None:
        """Return at once: nothing is kept in files."""

    def _hold(self, segments: tuple[Segment, ...], tensors: Mapping[str, Tensor]) -> Freezer:
        """Take the blocks of this rank's segment, with values from `tensors`, and let go of all others.

        Return what trains them.
        """
        for pipeline in (self.training, self.evaluation):
            pipeline.plan = self.facts.plan_of(segments)
        for name, tensor in tensors_of(self.chain, self.segment):
            if name in tensors:
                tensor.data = tensors[name].detach().clone()
        drop_tensors(self.chain, 0, self.segment[0])
        drop_tensors(self.chain, self.segment[1], len(self.chain.blocks))
        freezer = self._open_freezer(self.segment)
        # The norm that --clip-grad speaks of is that of all blocks together, which no rank has alone.
        self._update = Update(freezer.optimizer, replace(self._settings, clip_grad=None))
        return freezer

    def _bytes_sent(self) -> dict[str, int]:
        counts = self.training.wire.counts
        return {lane: self._before.get(lane, 0) + counts[lane].bytes_sent for lane in counts}
