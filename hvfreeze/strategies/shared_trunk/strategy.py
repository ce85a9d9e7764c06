"""The shared trunk: fine-tunes several models at once on one frozen trunk, without sending parameters or gradients.

    pipeline (trunk segments on different ranks) -> features -> each rank's own heads: loss -> backward -> update

All ranks use the same batches: they are one replica. A model's head is on one rank, its trunk on all of them. Source:
McNeela, Patel, Gupta: "Efficient Distributed Transfer Learning Using Pipelined Model Parallelism".
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.allocator import give_back
from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.comm.agreement import gather_tensors
from hvfreeze.comm.resources import end_set_up
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.data.batches import Batch
from hvfreeze.errors import RefusedError
from hvfreeze.freezing.frozen_prefix import Seal
from hvfreeze.model.blocks import Chain
from hvfreeze.model.segments import Segment, drop_tensors, segment_bytes, tensors_of
from hvfreeze.optim import open_optimizer
from hvfreeze.prefix.features import Halves
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.runs.reading import Move
from hvfreeze.strategies.base import Answers, State, StepResult, WholeModel, not_finite
from hvfreeze.strategies.model_parallel import (
    LocalPart,
    SplitStrategy,
    block_digests,
    digest_of,
    gather_digests,
    state_of,
)
from hvfreeze.strategies.shared_trunk.features import TrunkFeatures
from hvfreeze.strategies.shared_trunk.line import LANES
from hvfreeze.strategies.shared_trunk.tasks import Labels, Task
from hvfreeze.wording import plural


@dataclass(frozen=True, kw_only=True)
class TrunkFacts:
    """Facts of the run that are equal on all ranks."""

    names: tuple[str, ...]
    """Names of the tasks; task i is trained on rank i modulo the number of ranks."""
    classes: tuple[tuple[str, ...], ...]
    """Classes of each task."""
    segments: tuple[Segment, ...]
    """Segments by rank, without ranks that have none."""
    whole: bool
    """Whether every rank runs the whole trunk: the baseline."""
    labels: str
    cut: int
    """Blocks that are frozen in every model."""
    depth: int
    """Blocks that are frozen in some model."""
    identity: dict[str, Any]
    """The identity of the run, which a checkpoint must match."""
    cache: str
    exact: bool
    """Whether stored features have the bits that would be computed."""


BuildChain = Callable[[int], Chain]
"""Number of classes -> the model in blocks, initialised from torch's generator."""


class Head(LocalPart):
    """Trains the last blocks of a model on given features."""

    def __init__(self, task: Task, labels: Labels, settings: OptimizerConfig, *, build: BuildChain) -> None:
        self.task, self.labels = task, labels
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.seed)
            self.chain = build(len(labels.classes))
        self.depth = len(self.chain.blocks) - task.blocks
        drop_tensors(self.chain, 0, self.depth)
        optimizer = open_optimizer(self.chain.named_parameters(self.depth), settings, lr=task.lr)
        super().__init__(optimizer, settings, seed=task.seed)
        self._halves = Halves(self.chain, settings.precision)
        self._loss = partial(
            functional.cross_entropy, weight=labels.weights(task.loss), label_smoothing=settings.label_smoothing
        )

    def train(self, features: Tensor, labels: Tensor, clock: PhaseClock) -> tuple[float, Answers]:
        """Compute the gradients of a batch; return its mean loss and its answers, from before the update."""
        clock.enter("forward")
        self._halves.be_in_mode(training=True)
        with self.own_draws():
            logits = self._halves.suffix(features, self.depth).float()
            loss: Tensor = self._loss(logits, labels)
            clock.enter("backward")
            self.optimizer.zero_grad()
            loss.backward()
        return loss.item(), Answers(logits.detach(), labels)

    def predict(self, features: Tensor) -> Tensor:
        """Return the logits of a batch in evaluation mode."""
        self._halves.be_in_mode(training=False)
        with torch.no_grad():
            return self._halves.suffix(features, self.depth).float()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return parameters and buffers of the head's own blocks."""
        return [*self.chain.named_parameters(self.depth), *self.chain.named_buffers(self.depth)]


@dataclass(eq=False, kw_only=True)
class SharedTrunk(SplitStrategy):
    """Trains this rank's heads; see `Strategy` for its methods.

    After `settle_in`, this rank holds only its `segment` of `chain`.
    """

    facts: TrunkFacts
    segment: Segment
    heads: Sequence[Head]
    """This rank's heads, in the order of tasks."""
    training: TrunkFeatures
    evaluation: TrunkFeatures
    settle_in: Callable[[], None]
    """Opens stored features, while the whole trunk is present to check them, and drops other ranks' segments.

    A collective, called once before the first epoch, when the run directory exists.
    """
    _settled_in: bool = False
    _steps: int = 0

    def __post_init__(self) -> None:
        self._seal = Seal(tensors_of(self.chain, self.segment))

    @property
    def cut(self) -> int:
        """Blocks that are frozen in every model."""
        return self.facts.cut

    @property
    def models(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the models, one per task."""
        return [f"model-{name}" for name in self.facts.names]

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Prepare for these batches. Collective."""
        if not self._settled_in:
            self.settle_in()
            self._settled_in = True
            end_set_up()
        if not training:
            # A run whose time budget is used up ends within an epoch, with batches in the pipeline.
            self.training.line.finish()
        (self.training if training else self.evaluation).begin_epoch(batches)

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Train every head of this rank on one batch, while the pipeline works on later ones. Collective."""
        (batch,), clock = batches, self.clock
        served = self.training.of(batch)
        labels = self._labels(batch, training=True) if served.labels is None else served.labels
        losses: dict[str, float] = {}
        answers: dict[str, Answers] = {}
        for head, right in zip(self.heads, labels, strict=True):
            name = f"model-{head.task.name}"
            losses[name], answers[name] = head.train(served.features[head.depth], right, clock)
        broken = [name for head, (name, loss) in zip(self.heads, losses.items()) if not head.is_finite(loss)]

        # Collective: two numbers, no parameters.
        clock.enter("allreduce")
        signals = torch.tensor([len(broken), int(leave)], dtype=torch.int32)
        num_broken, num_leaving = self._sum(signals).tolist()
        if num_broken:
            self._stop(broken)

        clock.enter("optimizer")
        for head in self.heads:
            head.update(rate)
        self._seal.check(step=self._steps)
        self._steps += 1
        if num_leaving:
            self.training.line.finish()
        clock.enter("data")
        return StepResult(losses=losses, answers=answers, leave=bool(num_leaving))

    def predict(self, batch: Batch) -> dict[str, Answers]:
        """Return the answers for an evaluation batch; all ranks request the same batches. Collective."""
        served = self.evaluation.of(batch)
        rows = self._labels(batch, training=False)
        return {
            f"model-{head.task.name}": Answers(head.predict(served.features[head.depth]), labels)
            for head, labels in zip(self.heads, rows, strict=True)
        }

    def check(self, *, step: int) -> str:
        """Return a digest over the trunk's blocks and every head, independent of the number of ranks. Collective."""
        found = gather_digests(self.world, self.chain, self._digests(), name="trunk.digest", step=step)
        return digest_of(f"{key} {found[key]}" for key in [*range(self.facts.depth), *self.facts.names])

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield each model; on rank 0 with the only copy of the trunk, and one head at a time. Collective."""
        local = self.segment if self.world.rank == 0 or not self.facts.whole else (0, 0)
        give_back()
        trunk = gather_tensors(self.world, tensors_of(self.chain, local), name="trunk.model")
        heads = {head.task.name: head for head in self.heads}
        for name, classes in zip(self.facts.names, self.facts.classes, strict=True):
            own = heads[name].tensors() if name in heads else []
            head = gather_tensors(self.world, own, name="trunk.head")
            state = state_of(self.chain, {**trunk, **head}) if self.world.rank == 0 else {}
            yield WholeModel(f"model-{name}", state, classes)

    def state_dict(self) -> State:
        """Return this rank's heads; the trunk is not saved, only its identity."""
        counts = {"forwards": self.training.line.forwards, **self._counts(LANES)}
        own = {"heads": {head.task.name: head.state_dict() for head in self.heads}, "counts": counts}
        return State({"shared_trunk": self.facts.identity, "steps": self._steps}, own)

    def load_state_dict(self, state: State) -> None:
        """Load a state of the same rank.

        Raises:
            RefusedError: it belongs to other tasks, or another trunk.
        """
        theirs = state.shared["shared_trunk"]
        for key, value in self.facts.identity.items():
            if theirs.get(key) != value:
                raise RefusedError(
                    f"the checkpoint has other {key}; resume with the settings of the checkpoint, or start a new run"
                )
        for head in self.heads:
            head.load_state_dict(state.own["heads"][head.task.name])
        self._steps = state.shared["steps"]
        counts = dict(state.own["counts"])
        self.training.line.forwards = counts.pop("forwards", 0)
        self._count_on(counts)

    def repartitioned(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield for each rank the heads that it trains; counts continue on rank 0. Not a collective."""
        heads: dict[str, Any] = {}
        counts: Counter[str] = Counter()
        for own in owns:
            heads |= own["heads"]
            counts.update(own["counts"])
        if heads.keys() != set(self.facts.names):
            raise RefusedError(
                f"the checkpoint has {plural(len(heads), 'model')} ({', '.join(heads)}), but this run has "
                f"{len(self.facts.names)} ({', '.join(self.facts.names)}). Without --heads and --tasks there is one "
                f"model per rank: resume on {plural(len(heads), 'rank')}; else restore the --tasks file, or start a "
                "new run"
            )
        for rank in range(size):
            local = {name: heads[name] for name in self.facts.names[rank::size]}
            yield {"heads": local, "counts": dict(counts) if rank == 0 else {}}

    def report(self) -> dict[str, Any]:
        """Return the exchanged bytes, the cache's numbers, and each rank's resource use. Collective."""
        facts, training = self.facts, self.training
        stores = list((training.stores or {}).values())
        both = [*stores, *(self.evaluation.stores or {}).values()]
        took = sum(store.counters.read_seconds + store.counters.write_seconds for store in stores)
        of_a_batch = training.serve_seconds / max(1, training.batches_served)
        cache = {
            "bytes": sum(store.stored_bytes for store in stores),
            "rows_written": sum(store.counters.rows_written for store in stores),
            "rows_read": sum(store.counters.rows_read for store in stores),
        }
        local = {
            **cache,
            "exact": all(store.exact for store in both),
            # Time of the batches for which the pipeline did not run, minus that of the cache.
            "seconds_saved": of_a_batch * training.batches_silent - took if stores else 0.0,
            "trunk_bytes": segment_bytes(self.chain, self.segment),
            "forwards": training.line.forwards,
            "forward_seconds": self.clock.seconds["forward"],
            "signal_bytes": self.signal_bytes,
        }
        ranks, sent = self._numbers_of_ranks(local)
        return {
            "other_collective_bytes": max(ranks.pop("signal_bytes")),
            "cut_history": [Move(0, 0, self.cut)],
            "allreduce_bytes": 0,
            "cache": {
                "mode": facts.cache,
                "exact": facts.exact and all(ranks.pop("exact")),
                **{key: sum(ranks.pop(key)) for key in cache},
                "seconds_saved_predicted": 0.0,
                "seconds_saved": statistics.fmean(ranks.pop("seconds_saved")),
            },
            "trunk": {
                "mode": "whole" if facts.whole else "split",
                "segments": [list(segment) for segment in facts.segments],
                "labels": facts.labels,
                "wire_bytes": {lane: sent[lane] for lane in LANES},
                "evaluation_wire_bytes": sum(number for lane, number in sent.items() if lane not in LANES),
                **ranks,
            },
        }

    def close(self) -> None:
        """Publish cached rows and close all files."""
        self.training.close()
        self.evaluation.close()

    def _digests(self) -> Mapping[Any, str]:
        heads = {head.task.name: digest_tensors(head.tensors()) for head in self.heads}
        return {**block_digests(self.chain, range(*self.segment)), **heads}

    def _labels(self, batch: Batch, *, training: bool) -> list[Tensor]:
        return [head.labels.of(batch, training=training) for head in self.heads]

    def _stop(self, broken: list[str]) -> None:
        """Raise NumericsError on all ranks. Collective."""
        self.training.line.finish()
        names = [n for theirs in self.world.allgather_object(broken, name="trunk.broken") for n in theirs]
        what = f"NaN or Inf in the loss or gradients of {', '.join(names)}"
        raise not_finite(self._steps, what, "lower --lr or add --lr-warmup")
