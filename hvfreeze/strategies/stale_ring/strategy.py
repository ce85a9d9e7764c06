"""The stale ring: K modules on K - 1 ranks; backward passes of old batches run while a new batch goes forward.

    rank 0      module 1 ->                        -> module K, loss, back     a batch goes once around the ring
    rank 1               module 2 ->               |
    rank K-2                      ... module K-1 ->

In step t module k runs batch t forward and batch t-K+k backward, with the gradient that the next module computed in the
step before. So its gradient is exact, and K-k steps old; only that of the last module is new. The first and the last
module share a rank, and so an embedding that both use; labels stay there. Source: Yang et al., "Ouroboros: On
Accelerating Training of Transformer-Based Language Models", NeurIPS 2019, arXiv 1909.06695.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvfreeze.comm.agreement import TensorLayout
from hvfreeze.data.batches import Batch, announce
from hvfreeze.data.decoding import Inputs
from hvfreeze.errors import RefusedError
from hvfreeze.model.segments import Segment, tensors_of
from hvfreeze.optim import Mixture, Objective, Update
from hvfreeze.prefix.features import NOTHING_KEPT, Halves
from hvfreeze.runs.reading import Move
from hvfreeze.strategies.base import MODEL, Answers, State, StepResult
from hvfreeze.strategies.model_parallel import (
    SplitStrategy,
    block_digests,
    expect,
    gradients_of,
    optimizer_bytes,
    optimizer_state,
    put_optimizer_state,
    receive,
)
from hvfreeze.strategies.schedules import stale_batch
from hvfreeze.strategies.stale_ring.module import RingModule

LANES = ("activations", "errors")
EVALUATION = "evaluation.activations"
"""The lane on which evaluation batches are sent."""


@dataclass(frozen=True, kw_only=True)
class RingFacts:
    """Facts of the run that are equal on all ranks."""

    segments: tuple[Segment, ...]
    """The blocks of each module."""
    stale_after: int
    """Number of first steps without delayed gradients."""
    tied: tuple[str, ...]
    """Parameters that the first and the last module share."""
    tied_gradient: str
    """`sum` of both uses' gradients, or `half` of it."""

    @property
    def parts(self) -> int:
        """The number of modules, K."""
        return len(self.segments)

    def delay(self, part: int) -> int:
        """Return the delay of the gradients of module `part`, from 0, in steps."""
        return self.parts - 1 - part

    def rank_of(self, part: int) -> int:
        """Return the rank of a module: the last one is with the first."""
        return part % (self.parts - 1)

    def parts_of(self, rank: int) -> list[int]:
        """Return the modules of a rank."""
        return [part for part in range(self.parts) if self.rank_of(part) == rank]

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must match."""
        return {
            "segments": [list(segment) for segment in self.segments],
            "stale_after": self.stale_after,
            "tied_gradient": self.tied_gradient,
        }


@dataclass(eq=False, kw_only=True)
class StaleRing(SplitStrategy):
    """Trains this rank's modules; see `Strategy` for its methods."""

    cut: ClassVar[int] = 0
    """No block is ever frozen."""
    facts: RingFacts
    modules: Mapping[int, RingModule]
    """This rank's modules by number."""
    halves: Halves
    boundaries: Sequence[TensorLayout]
    """Layouts by depth, for a batch."""
    images: tuple[Inputs, Inputs]
    """Samples of training and of evaluation; read on the first rank only."""
    update: Update
    objective: Objective
    steps: int = 0
    """Steps made so far; the number of the next batch."""
    _since: int = 0
    """The first step of the current pipeline: after a change of the number of ranks, it starts empty."""
    _errors: dict[int, Tensor] = field(default_factory=dict)
    """The received gradient for the next backward pass of each module."""
    _expected: set[int] = field(default_factory=set)
    """Modules whose gradient is being received."""

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Prepare for these batches; those of the previous epoch stay in the pipeline."""
        if 0 in self.modules:
            announce(self.images[0 if training else 1], batches)

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Send a batch around the ring, run the due backward passes, and update. Collective."""
        (batch,), clock, now = batches, self.clock, self.steps
        clock.enter("forward")
        self.halves.be_in_mode(training=True)
        self.update.optimizer.zero_grad()
        stale, loss, logits = now >= self._first_stale(), 0.0, torch.empty(0)
        for part in sorted(self.modules):
            clock.enter("forward")
            y = self._forward(part, batch, waits=stale and part < self.facts.parts - 1)
            if part == self.facts.parts - 1:
                logits = y.float()
                found = self.objective.loss(logits, Mixture(logits, batch.labels, batch.ids))
                self.modules[part].replace_output(now, found)
                loss = found.item()
            if stale:
                self._backward(part)
        if not stale:
            for part in sorted(self.modules, reverse=True):
                self._backward(part)
        self._weigh_tied()
        gradients = gradients_of(self._named())
        loss, any_leaves = self._agree(
            step=now,
            loss=loss,  # 0 on all ranks but one
            sound=all(bool(torch.isfinite(gradient).all()) for gradient in gradients),
            gradients=gradients,
            leave=leave,
            remedy="lower --lr, raise --stale-after, or add --lr-warmup or --clip-grad",
        )
        self.update.make(rate)
        self.steps += 1
        self._expect()
        clock.enter("data")
        answers = {MODEL: Answers(logits.detach(), batch.labels)} if 0 in self.modules else {}
        return StepResult(losses={MODEL: loss}, answers=answers, leave=any_leaves)

    def predict(self, batch: Batch) -> Mapping[str, Answers]:
        """Return the answers on the first rank. Collective."""
        self.halves.be_in_mode(training=False)
        logits = torch.empty(0)
        for part in sorted(self.modules):
            (start, stop), last = self.modules[part].segment, self.facts.parts - 1
            x = self.images[1].load(batch.ids, batch.views) if part == 0 else self._get(start, part - 1, EVALUATION, 0)
            logits = self.halves.prefix(x, start, stop)
            if part < last:
                self.wire.drain()
                self._put(stop, logits, part + 1, EVALUATION, 0)
        return {MODEL: Answers(logits.float(), batch.labels)} if 0 in self.modules else {}

    def state_dict(self) -> State:
        """Return this rank's modules, their optimizer state, and the batches in the pipeline."""
        self._collect()
        own = {
            "ring": self.facts.identity(),
            "tensors": {name: tensor.detach() for name, tensor in self._tensors()},
            "optimizer": optimizer_state(self.update.optimizer, self._named()),
            "steps": [self.steps, self._since],
            "passes": {part: module.state_dict() for part, module in self.modules.items()},
            "errors": dict(self._errors),
            "counts": self._counts(),
        }
        return State({}, own)

    def load_state_dict(self, state: State) -> None:
        """Load a state of the same modules.

        Raises:
            RefusedError: it is of other modules.
        """
        own = state.own
        if own["ring"] != self.facts.identity():
            raise RefusedError(
                f"the checkpoint belongs to a ring of {own['ring']}, but this run has {self.facts.identity()}; "
                "resume with the settings of the checkpoint"
            )
        for name, tensor in self._tensors():
            tensor.data = own["tensors"][name].detach().clone()
        put_optimizer_state(self.update.optimizer, self._named(), own["optimizer"])
        self.steps, self._since = own["steps"]
        for part, module in self.modules.items():
            module.load_state_dict(own["passes"].get(part, {}))
        self._errors, self._expected = dict(own["errors"]), set()
        self._count_on(own["counts"])

    def repartitioned(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield for each rank of this ring its modules; batches in the pipeline are dropped. Not a collective."""
        tensors: dict[str, Tensor] = {}
        optimizer: dict[str, Any] = {}
        counts: Counter[str] = Counter()
        step = 0
        for own in owns:
            tensors |= own["tensors"]
            optimizer |= own["optimizer"]
            counts.update(own["counts"])
            step = restep(own["steps"][0])
        for rank in range(size):
            segments = [self.facts.segments[part] for part in self.facts.parts_of(rank)]
            local = [name for segment in segments for name, _ in tensors_of(self.chain, segment)]
            yield {
                "ring": self.facts.identity(),
                "tensors": {name: tensors[name] for name in local},
                "optimizer": {name: optimizer[name] for name in local if name in optimizer},
                "steps": [step, step],
                "passes": {},
                "errors": {},
                "counts": dict(counts) if rank == 0 else {},
            }

    def report(self) -> dict[str, Any]:
        """Return the exchanged bytes, and each rank's resource use. Collective."""
        local = {
            "signal_bytes": self.signal_bytes,
            "parameter_bytes": sum(tensor.nbytes for _, tensor in self._tensors()),
            "optimizer_bytes": optimizer_bytes(self.update.optimizer),
            "stash_bytes": sum(module.stash_bytes() for module in self.modules.values()),
            "waiting": sum(module.waiting for module in self.modules.values()),
        }
        ranks, sent = self._numbers_of_ranks(local, LANES)
        return {
            "cut_history": [Move(0, 0, 0)],
            "allreduce_bytes": 0,
            "other_collective_bytes": max(ranks.pop("signal_bytes")),
            "cache": dict(NOTHING_KEPT),
            "ring": {
                "parts": self.facts.parts,
                **self.facts.identity(),
                "tied": list(self.facts.tied),
                "delays": [self.facts.delay(part) for part in range(self.facts.parts)],
                "wire_bytes": {lane: sent[lane] for lane in LANES},
                "evaluation_wire_bytes": sent[EVALUATION],
                **ranks,
            },
        }

    def _first_stale(self) -> int:
        return max(self.facts.stale_after, self._since)

    def _forward(self, part: int, batch: Batch, *, waits: bool) -> Tensor:
        """Run a module for the step's batch, and send its output on."""
        module, number = self.modules[part], self.steps
        start, stop = module.segment
        if part == 0:
            with self.clock.within("data"):
                x = self.images[0].load(batch.ids, batch.views)
        else:
            x = self._get(start, part - 1, "activations", number)
        y = module.forward(x, number, waits=waits)
        if part < self.facts.parts - 1:
            self._put(stop, y, part + 1, "activations", number)
        return y

    def _backward(self, part: int) -> None:
        """Run the due backward pass of a module, and send the gradient of its input to the previous one."""
        module, facts = self.modules[part], self.facts
        due = stale_batch(self.steps, delay=facts.delay(part), since=self._first_stale())
        if due is None:
            return
        self.clock.enter("backward")
        error = None if part == facts.parts - 1 else self._error(part, due)
        found = module.backward(due, error)
        if part > 0:
            assert found is not None, "every block must use its input"
            self._put(module.segment[0], found, part - 1, "errors", due)

    def _error(self, part: int, batch: int) -> Tensor:
        """Return the gradient of a module's output for a batch."""
        self._expected.discard(part)
        kept = self._errors.pop(part, None)
        return self._get(self.modules[part].segment[1], part + 1, "errors", batch) if kept is None else kept

    def _expect(self) -> None:
        """Start to receive the gradients that the next step needs and that this one has sent."""
        for part, module in self.modules.items():
            due = self._due(part)
            if due is not None:
                boundary, source = self.boundaries[module.segment[1]], self.facts.rank_of(part + 1)
                expect(self.wire, boundary, source=source, lane="errors", seq=due)
                self._expected.add(part)

    def _collect(self) -> None:
        """Receive all pending gradients, which a checkpoint must contain."""
        for part in sorted(self._expected):
            due = self._due(part)
            assert due is not None
            self._errors[part] = self._error(part, due)
        self._expected.clear()

    def _due(self, part: int) -> int | None:
        """Return the batch of a module's backward pass in the next step, if its gradient is sent before that."""
        if part == self.facts.parts - 1 or self.steps < self._first_stale():
            return None
        return stale_batch(self.steps, delay=self.facts.delay(part), since=self._first_stale())

    def _weigh_tied(self) -> None:
        """Halve the gradients of parameters that both ends use, if requested."""
        if self.facts.tied_gradient == "half":
            for name, parameter in self._named():
                if name in self.facts.tied and parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [pair for module in self.modules.values() for pair in tensors_of(self.chain, module.segment)]

    def _digests(self) -> Mapping[int, str]:
        local = [block for module in self.modules.values() for block in range(*module.segment)]
        return block_digests(self.chain, local)

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        segments = [module.segment for module in self.modules.values()]
        return [pair for segment in segments for pair in self.chain.named_parameters(*segment)]

    def _put(self, depth: int, tensor: Tensor, part: int, lane: str, seq: int) -> None:
        """Send a tensor to the rank of module `part`."""
        flat = self.boundaries[depth].flat(tensor.detach())
        self.wire.put(flat, to=self.facts.rank_of(part), lane=lane, seq=seq)

    def _get(self, depth: int, part: int, lane: str, seq: int) -> Tensor:
        """Return the tensor that the rank of module `part` has sent."""
        with self.clock.within("allreduce"):
            return receive(self.wire, self.boundaries[depth], source=self.facts.rank_of(part), lane=lane, seq=seq)
