"""Shared parts of strategies whose ranks hold different blocks: messages, digests, signals, states and reports."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.comm.agreement import TensorLayout, gather_tensors
from hvfreeze.comm.point_to_point import Wire
from hvfreeze.comm.replica_sync import explain_difference
from hvfreeze.comm.resources import peak_memory_bytes
from hvfreeze.comm.world import World
from hvfreeze.errors import DivergedError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.segments import RunBlocks, tensors_of
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.base import not_finite
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


def gather_model(world: World, chain: Chain, local: Sequence[tuple[str, Tensor]], *, name: str) -> dict[str, Tensor]:
    """Return the model's state_dict on rank 0 from the parts of all ranks, and an empty dict elsewhere. Collective."""
    found = gather_tensors(world, local, name=name)
    return state_of(chain, found) if world.rank == 0 else {}


def state_of(chain: Chain, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's state_dict from its tensors, of which shared ones are given by their first name only."""
    model, firsts = chain.model, dict[int, str]()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {name: firsts.setdefault(id(tensor), name) for name, tensor in named}
    return {key: found[names[key]] for key in chain.model.state_dict()}


SIGNAL_BYTES = 5 * 8
"""Bytes that a rank sends in `agree`."""


def agree(
    world: World,
    *,
    name: str,
    step: int,
    loss: float,
    sound: bool,
    gradients: Sequence[Tensor],
    leave: bool,
    with_norm: bool,
    remedy: str,
    replicas: int | None = None,
) -> tuple[float, bool, float]:
    """Return the mean loss, whether some rank must leave, and the norm of all gradients, before the update.

    Equal on all ranks; the norm is 0 unless requested. Collective: every rank of `world` must call this.

    Args:
        world: all ranks.
        name: name of the collective.
        step: number of the step, for the error.
        loss: this rank's part of the replicas' losses.
        sound: whether all of this rank's gradients are finite.
        gradients: this rank's gradients.
        leave: this rank was asked to leave.
        with_norm: whether to compute the gradients' norm.
        remedy: advice against NaN and Inf.
        replicas: number of replicas, each with a loss and equal gradients; None if the model exists once.

    Raises:
        NumericsError: a loss or a gradient is NaN or Inf; on all ranks.
    """
    squares, finite = 0.0, math.isfinite(loss)
    if sound and with_norm and gradients:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        squares = float((torch.stack(norms) ** 2).sum())
    # The first three are whole numbers, whose sums are exact.
    local = torch.tensor([not finite, not sound, leave, loss if finite else 0.0, squares], dtype=torch.float64)
    losses, broken, leaving, total, squares = world.allreduce_sum(local, name=name).tolist()
    if losses:
        where = "" if replicas is None else f" on {int(losses)} of {plural(replicas, 'replica')}"
        raise not_finite(step, f"the loss is NaN or Inf{where}", remedy)
    if broken:
        raise not_finite(step, f"NaN or Inf in the gradients of {int(broken)} of {plural(world.size, 'rank')}", remedy)
    return total / (replicas or 1), bool(leaving), math.sqrt(squares / (replicas or 1))


def gradients_of(named: Named) -> list[Tensor]:
    """Return the gradients that exist."""
    return [parameter.grad for _, parameter in named if parameter.grad is not None]


def clip(gradients: Iterable[Tensor], norm: float, most: float | None) -> None:
    """Scale gradients with this norm down to `most`, if there is such a limit."""
    if most is not None and norm > most:
        for gradient in gradients:
            gradient.mul_(most / norm)


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


def cost_of_rank(clock: PhaseClock, wire: Wire, lanes: Iterable[str] | None = None) -> dict[str, float]:
    """Return a rank's resource use for a strategy's report; waiting is counted on `lanes`, by default on all."""
    return {
        "peak_memory_bytes": peak_memory_bytes(),
        "cpu_seconds": clock.processor_seconds(),
        "wait_seconds": wire.wait_seconds(lanes),
    }
