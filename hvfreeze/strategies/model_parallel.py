"""Shared parts of strategies whose ranks hold different blocks: messages, digests, signals, states and reports."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.comm.agreement import TensorLayout, gather_tensors
from hvfreeze.comm.point_to_point import Wire
from hvfreeze.comm.replica_sync import explain_difference
from hvfreeze.comm.resources import end_set_up, peak_memory_bytes
from hvfreeze.comm.world import World
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.errors import DivergedError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.segments import RunBlocks, tensors_of
from hvfreeze.optim import Update
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.base import MODEL, WholeModel, not_finite
from hvfreeze.wording import plural

Named = Iterable[tuple[str, nn.Parameter]]
"""Parameters by name."""


@torch.no_grad()
def dry_run(run: RunBlocks, images: Tensor, *, depth: int) -> list[TensorLayout]:
    """Return the layouts of the tensors between blocks, for `images`, (B, C, H, W): [d] is the one after d blocks."""
    boundaries, x = [TensorLayout.of(images)], images
    for block in range(depth):
        x = run(x, block, block + 1)
        boundaries.append(TensorLayout.of(x))
    return boundaries


def expect(wire: Wire, boundary: TensorLayout, *, source: int, lane: str, seq: int) -> None:
    """Start to receive the result of a later `receive` with the same arguments."""
    wire.expect((boundary.num_elements,), dtype=boundary.dtype, source=source, lane=lane, seq=seq)


def receive(wire: Wire, boundary: TensorLayout, *, source: int, lane: str, seq: int) -> Tensor:
    """Return the tensor that rank `source` has sent, with the shape and strides of `boundary`."""
    return boundary.formed(wire.get((boundary.num_elements,), dtype=boundary.dtype, source=source, lane=lane, seq=seq))


def block_digests(chain: Chain, blocks: Iterable[int]) -> dict[int, str]:
    """Return a digest of each block's parameters and buffers."""
    return {block: digest_tensors(tensors_of(chain, (block, block + 1))) for block in blocks}


def gather_digests(world: World, chain: Chain, local: Mapping[Any, str], *, name: str, step: int) -> dict[Any, str]:
    """Return the digests of all ranks, merged by block or other key. Collective.

    Raises:
        DivergedError: a block differs between ranks after step `step`; on all ranks.
    """
    gathered = world.allgather_object(local, name=name)
    found: dict[Any, str] = {}
    for rank, digests in enumerate(gathered):
        for block, digest in digests.items():
            if found.setdefault(block, digest) != digest:
                other = next(r for r, theirs in enumerate(gathered) if block in theirs)
                one = (block, block + 1)
                why = explain_difference(chain.named_parameters(*one), chain.named_buffers(*one), world)
                raise DivergedError(
                    f"block {chain.blocks[block].name} differs between ranks {other} and {rank} after step {step}; "
                    f"{why}"
                )
    return found


def digest_of(lines: Iterable[str]) -> str:
    """Return one digest for several."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def state_of(chain: Chain, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's state_dict from its tensors, of which shared ones are given by their first name only."""
    model, firsts = chain.model, dict[int, str]()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {name: firsts.setdefault(id(tensor), name) for name, tensor in named}
    return {key: found[names[key]] for key in chain.model.state_dict()}


def gradients_of(named: Named) -> list[Tensor]:
    """Return the gradients that exist."""
    return [parameter.grad for _, parameter in named if parameter.grad is not None]


def optimizer_state(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state by parameter name, so that other ranks can continue with it."""
    return {name: dict(optimizer.state[p]) for name, p in named if p in optimizer.state}


def put_optimizer_state(optimizer: torch.optim.Optimizer, named: Named, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Load an `optimizer_state`, with copies."""
    for name, parameter in named:
        if name in state:
            kept = state[name].items()
            optimizer.state[parameter] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in kept}


def optimizer_bytes(*optimizers: torch.optim.Optimizer | None) -> int:
    """Return the bytes of optimizers' states."""
    states = [state for one in optimizers if one is not None for state in one.state.values()]
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


class LocalPart:
    """Blocks that one rank trains alone, with a separate random generator.

    So results do not depend on the rank, or on what else it trains.

    Args:
        optimizer: of the trained parameters, from `open_optimizer`.
        settings: how they are updated.
        seed: seed of the draws, for dropout.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: OptimizerConfig, *, seed: int) -> None:
        self.optimizer, self._update = optimizer, Update(optimizer, settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._random = torch.get_rng_state()

    @contextmanager
    def own_draws(self) -> Iterator[None]:
        """Draw random numbers from this part's state of torch's generator."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            yield
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(before)

    def is_finite(self, loss: float) -> bool:
        """Return True if the loss and all gradients are finite."""
        return math.isfinite(loss) and self._update.gradients_are_finite()

    def update(self, rate: float) -> None:
        """Make an optimizer step at `rate`, --lr after --schedule; it scales the rates of parameter groups alike."""
        self._update.make(rate)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the part's parameters and buffers."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which training continues bit for bit."""
        tensors = {name: tensor.detach() for name, tensor in self.tensors()}
        return {"tensors": tensors, "optimizer": self.optimizer.state_dict(), "random": self._random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same part."""
        with torch.no_grad():
            for name, tensor in self.tensors():
                tensor.copy_(state["tensors"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self._random = state["random"]


@dataclass(eq=False, kw_only=True)
class SplitStrategy:
    """The common part of strategies whose ranks hold different blocks; see `Strategy`."""

    models: ClassVar[Sequence[str]] = (MODEL,)
    chain: Chain
    """The whole model; this rank has the tensors of its own blocks only."""
    world: World
    wire: Wire
    clock: PhaseClock
    """Seconds of a step by phase."""
    clip_grad: float | None = None
    """The largest norm of all ranks' gradients together; None if each rank clips its own, or none does."""
    signal_bytes: int = 0
    """Bytes that this rank has sent to agree with all others on each step."""

    def __post_init__(self) -> None:
        end_set_up()

    def settle(self) -> None:
        """Do nothing: every block is on one rank."""

    def check(self, *, step: int) -> str:
        """Return a digest that is independent of where blocks are; raises if copies of a block differ. Collective."""
        found = gather_digests(self.world, self.chain, self._digests(), name="split.digest", step=step)
        return digest_of(found[key] for key in sorted(found))

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield the model, gathered on rank 0. Collective."""
        found = gather_tensors(self.world, self._tensors(), name="split.model")
        yield WholeModel(MODEL, state_of(self.chain, found) if self.world.rank == 0 else {})

    def close(self) -> None:
        """Do nothing: there are no files."""

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors of the whole model that this rank contributes."""
        raise NotImplementedError

    def _digests(self) -> Mapping[Any, str]:
        """Return the digests of this rank's blocks."""
        raise NotImplementedError

    def _agree(
        self,
        *,
        step: int,
        loss: float,
        sound: bool,
        gradients: Sequence[Tensor],
        leave: bool,
        remedy: str,
        replicas: int | None = None,
    ) -> tuple[float, bool]:
        """Return the mean loss, and whether some rank must leave; clip the gradients of all ranks together.

        Equal on all ranks. Collective: every rank must call this before its update.

        Args:
            step: number of the step, for the error.
            loss: this rank's part of the replicas' losses.
            sound: whether all of this rank's gradients are finite.
            gradients: this rank's gradients.
            leave: this rank was asked to leave.
            remedy: advice against NaN and Inf.
            replicas: number of replicas, each with a loss and equal gradients; None if the model exists once.

        Raises:
            NumericsError: a loss or a gradient is NaN or Inf; on all ranks.
        """
        self.clock.enter("allreduce")
        squares, finite, size = 0.0, math.isfinite(loss), self.world.size
        if sound and self.clip_grad is not None and gradients:
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
            squares = float((torch.stack(norms) ** 2).sum())
        # The first three are whole numbers, whose sums are exact.
        local = torch.tensor([not finite, not sound, leave, loss if finite else 0.0, squares], dtype=torch.float64)
        losses, broken, leaving, total, squares = self._sum(local).tolist()
        if losses:
            where = "" if replicas is None else f" on {int(losses)} of {plural(replicas, 'replica')}"
            raise not_finite(step, f"the loss is NaN or Inf{where}", remedy)
        if broken:
            raise not_finite(step, f"NaN or Inf in the gradients of {int(broken)} of {plural(size, 'rank')}", remedy)
        self.clock.enter("optimizer")
        norm = math.sqrt(squares / (replicas or 1))
        if self.clip_grad is not None and norm > self.clip_grad:
            for gradient in gradients:
                gradient.mul_(self.clip_grad / norm)
        return total / (replicas or 1), bool(leaving)

    def _sum(self, signals: Tensor) -> Tensor:
        """Return the sum of all ranks' signals of a step. Collective."""
        self.signal_bytes += signals.nbytes if self.world.size > 1 else 0
        return self.world.allreduce_sum(signals, name="split.signals")

    def _counts(self, lanes: Iterable[str] | None = None) -> dict[str, int]:
        """Return the bytes that this rank has sent, for a checkpoint; on `lanes`, by default on all."""
        return {"signals": self.signal_bytes, **self.wire.bytes_sent(lanes)}

    def _count_on(self, counts: Mapping[str, int]) -> None:
        """Load `_counts`."""
        sent = dict(counts)
        self.signal_bytes = sent.pop("signals", 0)
        self.wire.count_on(sent)

    def _numbers_of_ranks(
        self, local: Mapping[str, Any], lanes: Iterable[str] | None = None
    ) -> tuple[dict[str, list[Any]], Counter[str]]:
        """Return `local` and the resource use of every rank, as lists by rank, and the bytes sent by lane. Collective.

        Waiting is counted on `lanes`, by default on all.
        """
        own = {
            **local,
            "peak_memory_bytes": peak_memory_bytes(),
            "cpu_seconds": self.clock.processor_seconds(),
            "wait_seconds": self.wire.wait_seconds(lanes),
        }
        gathered = self.world.allgather_object((own, self.wire.bytes_sent()), name="split.report")
        sent = Counter[str]()
        for _, theirs in gathered:
            sent.update(theirs)
        return {key: [numbers[key] for numbers, _ in gathered] for key in own}, sent
