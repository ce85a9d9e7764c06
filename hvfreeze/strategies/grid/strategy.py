"""The grid: one model on P x R ranks, cut into P partitions in R replicas, with exact gradients.

    pipeline: micro-batches forward, gradients back -> average each partition's gradients over replicas -> update ->
        vote

P = 1 is data parallelism, R = 1 model parallelism, anything else both at once. Every rank holds only its own blocks and
their optimizer state. The frozen prefix may be cached, and blocks may change ranks between epochs. Source: Awan et al.,
"HyPar-Flow", ISC 2020, arXiv 1911.05146.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hvfreeze.comm.replica_sync import check_buffers
from hvfreeze.data.batches import Batch, announce
from hvfreeze.data.decoding import Inputs
from hvfreeze.errors import DivergedError, RefusedError
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.model.segments import tensors_of
from hvfreeze.prefix.features import NOTHING_KEPT
from hvfreeze.strategies.base import MODEL, Answers, State, StepResult
from hvfreeze.strategies.grid.cached_rows import REMOTE_ROWS, FrozenDigests, merged
from hvfreeze.strategies.grid.partitioning import MOVING, GridFacts, LocalStage, Partitioning, repartitioned
from hvfreeze.strategies.grid.pipeline import EVALUATION, LANES, Pipeline, joined
from hvfreeze.strategies.model_parallel import SplitStrategy, block_digests, gradients_of, optimizer_bytes
from hvfreeze.wording import plural


@dataclass(eq=False, kw_only=True)
class Grid(SplitStrategy):
    """Trains this rank's blocks; see `Strategy` for its methods."""

    facts: GridFacts
    stage: LocalStage
    """This rank's blocks."""
    pipelines: tuple[Pipeline, Pipeline]
    """This rank's pipelines, of training and of evaluation."""
    images: tuple[Inputs, Inputs]
    """Images of both, in this order; read where batches enter the pipeline."""
    digests: FrozenDigests
    say: Callable[[str], None]
    """Logs a line for the user; does nothing except on rank 0."""
    _others: list[Batch] = field(default_factory=list)
    """The evaluation batches for which other pipelines of this replica answer."""

    @property
    def freezer(self) -> Freezer:
        """Freezer of this rank's blocks."""
        return self.stage.freezer

    @property
    def cut(self) -> int:
        """The number of frozen blocks."""
        return self.freezer.cut

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Prepare for these batches; between epochs blocks may change ranks. Collective."""
        may_change = training and self.facts.repartitions
        may_change = may_change and self.freezer.cadence.epochs_in(self.freezer.step).is_integer()
        if may_change:
            self._repartition(cached=False)
        self._enter(batches, training=training)
        views = max(1, self.images[0].transform.augment.num_views)
        cached = self.pipelines[0].rows.depth > 0 and self.stage.epochs_at_cut >= views
        if may_change and cached and self._repartition(cached=True):
            self._enter(batches, training=training)

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Run batches through the pipeline and back, average gradients over replicas, and update. Collective."""
        clock, reducer, pipeline = self.clock, self.freezer.reducer, self.pipelines[0]
        clock.enter("forward")
        pipeline.halves.be_in_mode(training=True)
        reducer.begin(passes=len(batches) * self.facts.micro_batches // self.stage.lines)
        result = pipeline.train(batches, cut=self.cut)
        clock.enter("allreduce")
        reducer.finish()
        gradients = gradients_of(reducer.carried)
        mean_loss, any_leaves = self._agree(
            step=self.freezer.step,
            loss=0.0 if result is None else result.share,
            sound=reducer.gradients_are_finite(),
            gradients=gradients,
            leave=leave,
            remedy="lower --lr, or add --lr-warmup or --clip-grad",
            replicas=self.stage.mesh.replicas,
        )
        self.stage.update.make(rate)

        # Collective at the end of an interval: the vote, after which all ranks have the same cut.
        clock.enter("vote")
        decision = self.freezer.after_step(0.0 if result is None else result.loss)
        if decision is not None:
            self._check_cut()
        clock.enter("data")
        if self.freezer.step == 1:
            # In the first step, before there is work to lose.
            check_buffers(self.chain.named_buffers(), self.chain.modules(), self.world, step=1)
        losses = {MODEL: mean_loss if result is None else result.loss}
        answers = {} if result is None else {MODEL: result.answers}
        return StepResult(losses=losses, answers=answers, leave=any_leaves, decision=decision)

    def settle(self) -> None:
        """Average the running statistics over the replicas of each partition. Collective."""
        self.freezer.average_statistics()

    def predict(self, batch: Batch) -> Mapping[str, Answers]:
        """Return the answers on the last partition. Collective among the ranks of a pipeline."""
        if any(other is batch for other in self._others):
            return {}
        self.pipelines[0].halves.be_in_mode(training=False)
        logits = self.pipelines[1].answer(batch)
        return {} if logits is None else {MODEL: Answers(logits, batch.labels)}

    def state_dict(self) -> State:
        """Return this rank's blocks and their optimizer state; a checkpoint contains a copy per replica."""
        own = {
            "grid": {**self.facts.identity(), "deals": [each.plain() for each in self.stage.partitionings]},
            **self.stage.state(),
            "signals": self.signal_bytes,
            "sent": self.wire.bytes_sent(),
        }
        return State({}, own)

    def load_state_dict(self, state: State) -> None:
        """Load a state of the same rank, with the blocks of that time.

        Raises:
            RefusedError: it is the state of another grid.
        """
        own = state.own
        theirs = dict(own["grid"])
        partitionings = [Partitioning.of(plain) for plain in theirs.pop("deals")]
        if theirs != self.facts.identity():
            raise RefusedError(
                f"the checkpoint belongs to a grid of {theirs}, but this run has "
                f"{self.facts.identity()}; resume with the settings of the checkpoint"
            )
        self.stage.put_back(partitionings, own)
        self._count_on({"signals": own["signals"], **own["sent"]})
        self.digests.forget()

    def repartitioned(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield for each rank of this grid the blocks that it holds now. Not a collective."""
        now = self.stage.partitioning
        segments = [now.segments[rank % now.parts] for rank in range(size)]
        for state in repartitioned(owns, self.chain, segments, restep=restep):
            yield {"grid": {**self.facts.identity(), "deals": [now.plain()]}, **state, "signals": 0}

    def report(self) -> dict[str, Any]:
        """Return the cut's history, the exchanged bytes, and each rank's resource use. Collective."""
        freezer, facts = self.freezer, self.facts
        local = {
            "allreduce_bytes": freezer.reducer.payload_bytes,
            "other_bytes": freezer.reducer.other_bytes + self.signal_bytes,
            "parameter_bytes": sum(tensor.nbytes for _, tensor in tensors_of(self.chain, self.stage.segment)),
            "optimizer_bytes": optimizer_bytes(freezer.optimizer),
            "cache": self.pipelines[0].rows.report(),
        }
        ranks, sent = self._numbers_of_ranks(local, LANES)
        cache: dict[str, Any] = {}
        for each in ranks.pop("cache"):
            cache = merged(cache, each) if each else cache
        return {
            "cut_history": freezer.cut_history,
            # Partitions differ in size: report the rank with the most bytes.
            "allreduce_bytes": max(ranks["allreduce_bytes"]),
            "other_collective_bytes": max(ranks.pop("other_bytes")),
            "cache": {**(cache or NOTHING_KEPT), "mode": facts.cache},
            "grid": {
                **facts.shape(),
                "pipeline": facts.schedule,
                "segments": [list(segment) for segment in self.stage.partitioning.segments],
                "deals": [
                    {**each.plain(), "replicas": facts.replicas * facts.parts // each.parts}
                    for each in self.stage.partitionings
                ],
                "wire_bytes": {lane: sent[lane] for lane in LANES},
                "evaluation_wire_bytes": sent[EVALUATION],
                "errand_bytes": sent[REMOTE_ROWS],
                "moved_bytes": sent[MOVING],
                **ranks,
            },
        }

    def close(self) -> None:
        """Publish cached rows and close all files."""
        for pipeline in self.pipelines:
            pipeline.rows.close()

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return tensors_of(self.chain, self.stage.segment if self.stage.mesh.replica == 0 else (0, 0))

    def _digests(self) -> Mapping[int, str]:
        return block_digests(self.chain, range(*self.stage.segment))

    def _check_cut(self) -> None:
        """Raise DivergedError on all ranks if partitions, which count votes separately, differ in the cut. Collective.

        Ranks of a pipeline that disagree would wait for gradients that are never sent.
        """
        cuts = self.world.allgather_object(self.cut, name="grid.cut")
        odd = next((rank for rank, theirs in enumerate(cuts) if theirs != cuts[0]), None)
        if odd is not None:
            raise DivergedError(
                f"after the vote of step {self.freezer.step}, rank {odd} has cut {cuts[odd]} and rank 0 has cut "
                f"{cuts[0]}; use the same processor model and versions on all ranks"
            )

    def _enter(self, batches: Sequence[Batch], *, training: bool) -> None:
        """Determine where these batches enter the pipeline. Collective."""
        number, stage = (0 if training else 1), self.stage
        pipeline, images = self.pipelines[number], self.images[number]
        rows = pipeline.rows
        if training:
            local = [one for batch in batches for one in stage.micro_batches(batch)]
        else:
            # Pipelines of a replica share its evaluation batches too.
            local = list(batches[stage.line :: stage.lines])
            self._others = [batch for place, batch in enumerate(batches) if place % stage.lines != stage.line]
        for line in rows.begin_epoch(local):
            self.say(line)
        if stage.mesh.before is None and not pipeline.reads:
            whole = training and rows.depth == 0
            coming = [joined(stage.micro_batches(batch)) for batch in batches] if whole else local
            announce(images, [batch for batch in coming if not rows.cached(batch)])

    def _repartition(self, *, cached: bool) -> bool:
        """Repartition if it is due; return whether it was. Collective."""
        after = self.stage.next_partitioning(cached=cached)
        if after is None:
            return False
        self.settle()
        self.stage.hand_over(after)
        why = f"{'cached' if cached else 'frozen'} up to cut {self.cut}"
        self.say(f"grid: repartitioned to {after.describe()} in {plural(self.stage.mesh.replicas, 'line')}: {why}")
        return True
