"""Data parallelism, the default: every rank holds the whole model, and ranks vote on which blocks to freeze.

    prefix (cached or computed, no gradient) -> suffix -> loss -> backward while gradients travel -> update -> vote

Replicas start equal and change only by averaged gradients and by decisions that are equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.low_rank import pool_into
from hvfreeze.comm.reducer import Signals
from hvfreeze.comm.replica_sync import (
    check_buffers,
    pooled_statistics,
    running_statistics,
)
from hvfreeze.comm.world import World
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch, TrainFeed
from hvfreeze.errors import UsageError
from hvfreeze.freezing.coherence import LEAST_PARTS, count_probe_batches
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.model.modes import in_evaluation
from hvfreeze.optim import Objective, Update, arithmetic_of, needs_equal_arithmetic
from hvfreeze.prefix.features import Halves
from hvfreeze.strategies.base import MODEL, Answers, BuildContext, State, StepResult, not_finite
from hvfreeze.strategies.build_parts import (
    check_rows,
    open_both_features,
    open_cost_inputs,
    open_freezer,
)
from hvfreeze.strategies.compression_choice import CompressionChoice, open_compression_choice
from hvfreeze.strategies.whole_replicas import WholeReplicas


def open_data_parallel(context: BuildContext, config: Config) -> DataParallel:
    """Return the strategy for a run. Collective.

    Raises:
        UsageError: the freeze settings or the batch do not fit the model or the world; on all ranks.
    """
    check_arithmetic(context, config.optimizer)
    return open_replicas(context, config, exchanging=context.world)


def open_replicas(context: BuildContext, config: Config, *, exchanging: World) -> DataParallel:
    """Return replicas whose gradients are averaged over `exchanging`; its ranks vote. Collective over all ranks.

    Raises:
        UsageError: the freeze settings or the batch do not fit the model or the world; on all ranks.
    """
    world, settings = context.world, config.optimizer
    # BatchNorm that keeps its statistics does not normalise by the batch, so any batch size is valid.
    if config.freeze.statistics != "kept":
        start, asked = config.freeze.cut or 0, f"--batch-size ({settings.batch_size})"
        check = partial(check_rows, context, start=start, rows=settings.batch_size, asked=asked)
        raise_on_all_ranks(world, check, name="rows")
    named = context.chain.model.named_parameters()
    freezer = raise_on_all_ranks(
        world, lambda: open_freezer(context, named, settings, config.freeze, world=exchanging), name="freezer"
    )
    halves = Halves(context.chain, settings.precision)
    costs = open_cost_inputs(context, config, freezer, size=world.size)
    training, evaluation = open_both_features(context, config, halves, costs, world=world)
    return DataParallel(
        world=exchanging,
        halves=halves,
        training=training,
        evaluation=evaluation,
        clock=context.clock,
        freezer=freezer,
        update=Update(freezer.optimizer, settings),
        objective=Objective(
            task=context.corpus.task,
            smoothing=settings.label_smoothing,
            mixup=settings.mixup,
            seed=config.data_seed,
            replica=context.replica,
        ),
        compression=open_compression_choice(
            freezer.reducer,
            context.clock,
            exchanging,
            asked=settings.compression,
            accumulate=settings.accumulate,
            say=context.say,
        ),
        feed=context.feed,
        advice=advice_on(settings),
    )


def advice_on(settings: OptimizerConfig) -> str:
    """Return advice for a user whose training has diverged."""
    advice = "lower --lr, or add --lr-warmup or --clip-grad"
    if settings.compression != "none":
        advice += f", or drop --compression {settings.compression}"
    return advice


def check_arithmetic(context: BuildContext, settings: OptimizerConfig) -> None:
    """Raise UsageError if updates depend on norms and ranks compute norms with different bits. Collective."""
    if not needs_equal_arithmetic(settings):
        return
    local = arithmetic_of(tuple(parameter.shape) for parameter in context.chain.model.parameters())
    digests = context.world.allgather_object(local, name="arithmetic")
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise UsageError(
            f"--clip-grad and --optimizer lars: rank {odd[0]} and rank 0 compute different norms from the same "
            "input, so replicas would diverge; use the same processor model and --threads on all ranks, or use sgd "
            "or adamw without --clip-grad"
        ).on_all_ranks()


@dataclass(eq=False, kw_only=True)
class DataParallel(WholeReplicas):
    """Trains equal replicas; see `Strategy` for its methods."""

    freezer: Freezer
    """Decides the cut; has the optimizer and the reducer."""
    update: Update
    objective: Objective
    compression: CompressionChoice | None
    feed: TrainFeed
    """The samples, for gradient probes of frozen blocks."""
    advice: str
    """Advice for the user after NaN or Inf."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.optimizer, self.reducer = self.freezer.optimizer, self.freezer.reducer
        self.freezer.prefix.on_move(self._follow_cut)

    @property
    def cut(self) -> int:
        """The number of frozen blocks."""
        return self.freezer.cut

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Make one optimizer step. Collective."""
        clock, count, logits_of, value = self.clock, len(batches), [], 0.0
        for number, batch in enumerate(batches, 1):
            clock.enter("forward")
            self.halves.be_in_mode(training=True)
            features, step = self.training.of(batch), self.freezer.step
            seen = self.objective.mix(features, batch.labels, batch.ids, step=step, number=number)
            logits = self.halves.suffix(seen.features, self.training.cut).float()
            loss = self.objective.loss(logits, seen) / count
            value += loss.item()
            logits_of.append(logits.detach())

            clock.enter("backward")
            if number == 1:
                self.reducer.begin(passes=count)
            if number == count:
                # Collective: the signals, then each bucket of gradients, are sent while the last backward pass runs.
                self.reducer.signal(nonfinite=not math.isfinite(value), leave=leave)
            loss.backward()
        clock.enter("allreduce")
        signals = self.reducer.finish()
        self._stop_unless_finite(signals)

        clock.enter("optimizer")
        self.update.make(rate)

        if self.freezer.needs_probe:
            clock.enter("vote")
            self._probe()

        # Collective at the end of an interval: the vote, after which all ranks have the same cut.
        clock.enter("vote")
        decision = self.freezer.after_step(value)
        clock.enter("data")
        if self.freezer.step == 1:
            # In the first step, before there is work to lose.
            check_buffers(self.chain.named_buffers(), self.chain.modules(), self.world, step=1)
        if self.compression is not None:
            self.compression.after_step()
        answers = {MODEL: Answers(joined(logits_of), joined([batch.labels for batch in batches]))}
        return StepResult(losses={MODEL: value}, answers=answers, leave=bool(signals.leave), decision=decision)

    def settle(self) -> None:
        """Average the running statistics; everything else is equal on all ranks after every step. Collective."""
        self.freezer.average_statistics()

    def state_dict(self) -> State:
        """Return the model and optimizer, equal on all ranks, and this rank's statistics and accumulators."""
        shared = {
            **self._model_state(),
            "optimizer": self.optimizer.state_dict(),
            "exchange": {} if self.compression is None else self.compression.state_dict(),
            "bytes": [self.reducer.payload_bytes, self.reducer.other_bytes],
        }
        own = {
            "statistics": [tensor.clone() for tensor in self._statistics()],
            "freezer": self.freezer.state_dict(),
            "reducer": self.reducer.state_dict(),
        }
        return State(shared, own)

    def load_state_dict(self, state: State) -> None:
        """Load a state of the same rank."""
        self._began = False
        # The freezer first: it takes frozen parameters out of the optimizer, whose state then fits.
        self.freezer.load_state_dict(state.own["freezer"])
        self._load_model(state.shared)
        self.optimizer.load_state_dict(state.shared["optimizer"])
        kept, statistics = state.own["statistics"], self._statistics()
        if len(kept) < len(statistics):
            # Checkpoints of earlier versions have only BatchNorm's here; InstanceNorm's are in the model.
            statistics = self._statistics(_BatchNorm)
        for tensor, saved in zip(statistics, kept, strict=True):
            tensor.copy_(saved)
        self.reducer.payload_bytes, self.reducer.other_bytes = state.shared["bytes"]
        if self.compression is not None:
            self.compression.load_state_dict(state.shared["exchange"])
        self.reducer.load_state_dict(state.own["reducer"])
        self.freezer.prefix.seal()

    def repartitioned(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield the same state for each rank: the ranks' own states, pooled. Not a collective."""
        yield from repeat(pooled(owns, restep=restep), size)

    def report(self) -> dict[str, Any]:
        """Return the cut's history, the exchanged bytes, and the cache's numbers. Collective."""
        return {
            "allreduce_bytes": self.reducer.payload_bytes,
            "other_collective_bytes": self.reducer.other_bytes,
            "cut_history": self.freezer.cut_history,
            "cache": self.training.report(),
            **({} if self.compression is None else self.compression.report()),
        }

    def close(self) -> None:
        """Publish cached rows and close all files."""
        super().close()
        # Hooks on gradients would count another strategy's backward passes over the same model.
        self.reducer.carry([])

    def _statistics(self, kind: type[_NormBase] = _NormBase) -> list[Tensor]:
        return [tensor for pair in running_statistics(self.chain.modules(), kind) for tensor in pair]

    def _stop_unless_finite(self, signals: Signals) -> None:
        """Raise NumericsError on all ranks in the same step if a loss or an averaged gradient is NaN or Inf."""
        if signals.nonfinite:
            where = f" on {signals.nonfinite} of {self.world.size} ranks" if self.world.size > 1 else ""
            what = f"the loss is NaN or Inf{where}"
        elif not self.reducer.gradients_are_finite():
            what = "the gradients contain NaN or Inf"
        else:
            return
        raise not_finite(self.freezer.step, what, self.advice)

    def _probe(self) -> None:
        """Probe the frozen blocks from images, even if their output is cached. Not a collective."""
        cadence = self.freezer.cadence
        count = count_probe_batches(cadence.interval)
        parts = max(2, LEAST_PARTS // count)
        # One sample cannot be divided.
        count = max(count, -(-LEAST_PARTS // self.feed.plan.batch_size))

        def losses() -> Iterator[Tensor]:
            for batch in self.feed.epoch(cadence.epoch(self.freezer.step))[:count]:
                images = self.feed.images.load(batch.ids, batch.views)
                rows = (images, batch.labels, torch.from_numpy(batch.ids))
                for part, labels, samples in zip(*(each.chunk(parts) for each in rows), strict=True):
                    logits = self.halves.part(part, 0, len(self.chain.blocks)).float()
                    yield self.objective.task.training_loss(logits, labels, samples)

        with in_evaluation(self.chain.model):
            self.freezer.probe(losses())

    def _cuts(self) -> Sequence[int]:
        return self.freezer.prefix.cuts

    def _follow_cut(self) -> None:
        """After a change of the cut, update both splits' activations and choose the compression again. Collective."""
        if self._began:
            super()._follow_cut()
            if self.compression is not None:
                self.compression.follow()


def pooled(owns: Iterable[dict[str, Any]], *, restep: Callable[[int], int]) -> dict[str, Any]:
    """Return the own state of every rank of a job of another size; see `Strategy.repartitioned`.

    Running statistics are pooled over the batches of all ranks. Error-feedback residuals are averaged, so that they add
    the same to the average gradient.
    """
    result: dict[str, Any] = {}
    statistics = []
    for number, own in enumerate(owns, 1):
        statistics.append(own["statistics"])
        if number == 1:
            result = {**own, "freezer": Freezer.redealt(own["freezer"], restep=restep)}
        else:
            for kept in ("low_rank", "owed"):
                pool_into(result["reducer"].get(kept, {}), own["reducer"].get(kept, {}), number=number)
    columns = list(zip(*statistics, strict=True))
    pairs = zip(columns[::2], columns[1::2], strict=True)
    return {**result, "statistics": [tensor for pair in pairs for tensor in pooled_statistics(*pair)]}


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the tensors; a single one is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
