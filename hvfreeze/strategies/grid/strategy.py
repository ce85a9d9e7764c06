"""One unmodified model on P x R ranks: cut into P partitions, in R replicas, with exact gradients.

    line: micro-batches forward, errors back -> each partition's gradients averaged over its replicas -> update -> vote

P = 1 is data parallelism, R = 1 model parallelism, anything else both at once. Every rank holds its own blocks alone,
with their optimizer state; what is frozen may be cached (rows/), and ranks be dealt out anew (dealing/).
Source: Awan et al., "HyPar-Flow", ISC 2020, arXiv 1911.05146.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.chain.segments import tensors_of
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.data.batches import Batch, announce
from hvfreeze.data.decoding import Images
from hvfreeze.errors import RefusedError
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.ranks.agreement import gather_tensors
from hvfreeze.ranks.machine.memory import end_set_up
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.grid.account import share_of, together_of
from hvfreeze.strategies.grid.agreement import Agreement, clip, digest_of
from hvfreeze.strategies.grid.dealing.deal import Deal
from hvfreeze.strategies.grid.dealing.holding import Holding
from hvfreeze.strategies.grid.dealing.state import redealt
from hvfreeze.strategies.grid.facts import Facts
from hvfreeze.strategies.grid.line.micro_batches import joined
from hvfreeze.strategies.grid.line.pipeline import Pipeline
from hvfreeze.strategies.grid.rows.entry import Entry
from hvfreeze.strategies.grid.rows.frozen import SpreadPrefix
from hvfreeze.strategies.strategy import MODEL, Answers, State, StepResult, WholeModel


class Grid:
    """Trains this rank's blocks; see `Strategy` for what its methods promise.

    Args:
        facts: what all ranks know.
        holding: this rank's blocks.
        pipelines: this rank's part in its line, in training and in evaluation.
        images: of both, in this order; read where batches come into the line.
        entries: where batches of both come in.
        settings: how parameters are updated.
        world: all ranks.
        clock: where the seconds of a step go.
        say: tells the user a line; does nothing but on rank 0.
    """

    def __init__(
        self,
        facts: Facts,
        holding: Holding,
        pipelines: tuple[Pipeline, Pipeline],
        images: tuple[Images, Images],
        entries: tuple[Entry, Entry],
        *,
        settings: OptimizerConfig,
        world: World,
        clock: PhaseClock,
        say: Callable[[str], None],
    ) -> None:
        self.facts, self.holding, self.pipelines = facts, holding, pipelines
        self.training, self.evaluation = pipelines
        self.images, self.entries, self.world, self.clock, self.chain = images, entries, world, clock, holding.chain
        self._settings, self._say = settings, say
        self._agreement = Agreement(world, replicas=facts.replicas, clips=settings.clip_grad is not None)
        self._before: dict[str, int] = {}
        self._prefix = SpreadPrefix(world, self.chain)
        self._others: list[Batch] = []
        """The evaluation batches for which other lines of this replica answer."""
        end_set_up()

    @property
    def freezer(self) -> Freezer:
        """What trains this rank's blocks."""
        return self.holding.freezer

    @property
    def cut(self) -> int:
        """Number of frozen blocks."""
        return self.freezer.cut

    @property
    def models(self) -> Sequence[str]:
        """The one model."""
        return (MODEL,)

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Get ready for these batches; between epochs ranks may be dealt out anew, see `deal.next_deal`."""
        whole = training and self.freezer.step % self.freezer.cadence.steps_per_epoch == 0
        if whole and self.facts.redeals:
            self._deal_out(cached=False)
        self._enter(batches, training=training)
        views = max(1, self.images[0].transform.augment.num_views)
        cached = self.entries[0].depth > 0 and self.holding.passes_at_cut >= views
        if whole and self.facts.redeals and cached and self._deal_out(cached=True):
            self._enter(batches, training=training)

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Send batches through the line and back, average gradients over replicas, and update this rank's blocks."""
        clock, reducer = self.clock, self.freezer.reducer
        clock.enter("forward")
        self.training.halves.be_in_mode(training=True)
        reducer.begin(passes=len(batches) * self.training.rows.count)
        learnt = self.training.train(batches, cut=self.cut)
        clock.enter("allreduce")
        reducer.finish()
        # All ranks: whether to go on, and the norm of all gradients.
        loss = learnt.loss if learnt else None
        agreed = self._agreement.reach(learnt.share if learnt else None, reducer, leave=leave, step=self.freezer.step)

        clock.enter("optimizer")
        clip(reducer, norm=agreed.norm, most=self._settings.clip_grad)
        self.holding.update.make(rate)

        # All ranks, at the end of an interval: the vote, and the same cut in the same step.
        clock.enter("vote")
        decision = self.freezer.after_step(0.0 if loss is None else loss)
        if decision is not None:
            self._agreement.check_cut(self.cut, step=self.freezer.step)
        clock.enter("data")
        losses, answers = {MODEL: agreed.loss if loss is None else loss}, {MODEL: learnt.answers} if learnt else {}
        return StepResult(losses=losses, answers=answers, leave=agreed.leave, decision=decision)

    def settle(self) -> None:
        """Average the running statistics over the replicas of each partition."""
        self.freezer.average_statistics()

    def predict(self, batch: Batch) -> Mapping[str, Answers]:
        """Return on the last partition what the model says. Collective among the ranks of a line."""
        if any(other is batch for other in self._others):
            return {}
        self.training.halves.be_in_mode(training=False)
        logits = self.evaluation.answer(batch)
        return {} if logits is None else {MODEL: Answers(logits, batch.labels)}

    def check(self, *, step: int) -> str:
        """Return a digest over all blocks, which does not depend on where they are cut; raise where replicas differ."""
        mine = {
            block: digest_tensors(tensors_of(self.chain, (block, block + 1))) for block in range(*self.holding.segment)
        }
        everyone = self.world.allgather_object(mine, name="grid.digest")
        return digest_of(everyone, [block.name for block in self.chain.blocks], step=step)

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield the model, put together on rank 0 from the ranks of its line."""
        mine = self.holding.segment if self.holding.mesh.replica == 0 else (0, 0)
        found = gather_tensors(self.world, tensors_of(self.chain, mine), name="grid.model")
        order = self.chain.model.state_dict() if self.world.rank == 0 else {}
        yield WholeModel(MODEL, {name: found[name] for name in order})

    def state_dict(self) -> State:
        """Return this rank's blocks with their optimizer state; a checkpoint holds a copy of each replica's."""
        own = {
            "grid": {**self.facts.identity(), "deals": [deal.plain() for deal in self.holding.deals]},
            **self.holding.state(),
            "signals": self._agreement.bytes,
            "sent": self._bytes_sent(),
        }
        return State({}, own)

    def load_state_dict(self, state: State) -> None:
        """Continue from a state of the same rank, with the blocks dealt out as they were then.

        Raises:
            RefusedError: it is the state of another grid.
        """
        own = state.own
        theirs = dict(own["grid"])
        deals = [Deal.of(plain) for plain in theirs.pop("deals")]
        if theirs != self.facts.identity():
            raise RefusedError(f"the checkpoint is of a grid of {theirs}, and this is one of {self.facts.identity()}")
        self.holding.put_back(deals, own)
        self._agreement.replicas, self._agreement.bytes = self.holding.mesh.replicas, own["signals"]
        self._prefix = SpreadPrefix(self.world, self.chain)
        counts = self.training.wire.counts
        self._before = {lane: sent - counts[lane].bytes_sent for lane, sent in own["sent"].items()}

    def redealt(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield for each rank of this grid the blocks that it holds now. Not a collective."""
        deal = self.holding.deal
        for state in redealt(
            owns, self.chain, [deal.segments[rank % deal.parts] for rank in range(size)], restep=restep
        ):
            yield {"grid": {**self.facts.identity(), "deals": [deal.plain()]}, **state, "signals": 0}

    def report(self) -> dict[str, Any]:
        """Return the cut's history, what was exchanged, and what each rank had and did."""
        mine = share_of(
            self.freezer,
            tensors_of(self.chain, self.holding.segment),
            sent=self._bytes_sent(),
            counts=self.training.wire.counts,
            cpu_seconds=self.clock.processor_seconds(),
            signal_bytes=self._agreement.bytes,
            cache=self.entries[0].report(),
        )
        shares = self.world.allgather_object(mine, name="grid.report")
        return {
            "cut_history": self.freezer.cut_history,
            **together_of(self.facts, self.holding.deals, shares),
        }

    def close(self) -> None:
        """Keep what is cached and let go of all files."""
        for entry in self.entries:
            entry.close()

    def _enter(self, batches: Sequence[Batch], *, training: bool) -> None:
        """Settle where these batches come into the line. Collective."""
        number, holding = (0 if training else 1), self.holding
        pipeline, images, entry = self.pipelines[number], self.images[number], self.entries[number]
        if training:
            mine = [some for batch in batches for some in pipeline.rows.of(batch)]
        else:
            # Lines of one replica share its evaluation batches too.
            mine = list(batches[holding.line :: holding.lines])
            self._others = [batch for place, batch in enumerate(batches) if place % holding.lines != holding.line]
        self._prefix.follow(tuple(move.cut for move in self.freezer.cut_history), held=self.holding.segment)
        for line in entry.begin_epoch(mine, holding, self._prefix):
            self._say(line)
        if holding.mesh.before is None and not pipeline.reads:
            whole = training and entry.depth == 0
            coming = [joined(pipeline.rows.of(batch)) for batch in batches] if whole else mine
            announce(images, [batch for batch in coming if not entry.cached(batch)])

    def _deal_out(self, *, cached: bool) -> bool:
        """Deal ranks out anew where that is due; return whether it was. Collective."""
        deal = self.holding.next_deal(cached=cached)
        if deal is None:
            return False
        self.settle()
        self.holding.hand_over(deal)
        self._agreement.replicas = lines = self.holding.mesh.replicas
        why = f"the first {self.cut} blocks are {'cached' if cached else 'frozen'}"
        self._say(f"grid: {deal.told()} in {lines} lines from here on: {why}")
        return True

    def _bytes_sent(self) -> dict[str, int]:
        counts = self.training.wire.counts
        return {lane: self._before.get(lane, 0) + counts[lane].bytes_sent for lane in counts}
