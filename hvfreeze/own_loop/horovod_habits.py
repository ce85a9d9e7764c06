"""What scripts that were written for Horovod do: arguments of its optimizer, and how they make ranks equal."""

from __future__ import annotations

import sys
from typing import Any

import torch

from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.chain.blocks import Chain
from hvfreeze.config.rules import parse_compression
from hvfreeze.errors import DivergedError, UsageError
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.ranks.world import World

COMPRESSORS = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
"""Horovod's, by their names."""
BROADCAST = "horovod.torch.functions"
"""The module whose `broadcast_optimizer_state` calls `step` to create an optimizer's state."""


def compression_of(value: Any) -> str:
    """Return none, fp16 or powersgd:R for our word or for one of `hvd.Compression`'s classes.

    Raises:
        UsageError: it is neither.
    """
    known = COMPRESSORS.get(getattr(value, "__name__", ""), value)
    if not isinstance(known, str) or known == "auto":
        raise UsageError(f"compression ({value}) must be none, fp16, powersgd:R, hvd.Compression.none or .fp16")
    parse_compression(known)
    return known


def check_arguments(
    optimizer: torch.optim.Optimizer, steps_per_epoch: int, num_epochs: int, op: Any, gradient_predivide_factor: float
) -> None:
    """Raise UsageError for what no vote can be held with, or for sums that are no average."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS evaluates as often as it likes, on each rank on its own; give another optimizer")
    for name, value in (("steps_per_epoch", steps_per_epoch), ("num_epochs", num_epochs)):
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} ({value}) must be a whole number, at least 1")
    hvd: Any = sys.modules.get("horovod.torch")
    if op is not None and op != getattr(hvd, "Average", None):
        raise UsageError(f"op ({op}) must be hvd.Average: gradients are averaged over ranks")
    if gradient_predivide_factor != 1.0:
        raise UsageError(
            f"gradient_predivide_factor ({gradient_predivide_factor}) must be 1: gradients are divided before they are "
            "summed, by the number of ranks"
        )


def called_by_broadcast() -> bool:
    """Tell whether `step` was called by `hvd.broadcast_optimizer_state`; a scheduler may stand in between."""
    frame = sys._getframe(2)
    for _ in range(3):
        if frame.f_globals.get("__name__") == BROADCAST:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def create_state(optimizer: torch.optim.Optimizer, world: World) -> None:
    """Create the state that `hvd.broadcast_optimizer_state` asks for; unlike a step, it moves no weight.

    With one process there is nothing to send, and nothing to create.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if world.size > 1:
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(parameters, before):
                parameter.copy_(value)
    for parameter in parameters:
        parameter.grad = None


def begin_alike(optimizer: torch.optim.Optimizer, chain: Chain, world: World, *, created: bool) -> None:
    """See to it that ranks start from equal parameters, and from no state where none was loaded.

    Collective: every rank of `world` must call this.

    Args:
        optimizer: whose state is meant.
        chain: the model.
        world: the ranks.
        created: whether `create_state` has made all the state that there is; if so on all ranks, it is dropped.

    Raises:
        DivergedError: ranks have different parameters.
    """
    digest = digest_tensors(chain.named_parameters()) if world.size > 1 else ""
    everyone = world.allgather_object((digest, created), name="optimizer.begin")
    odd = [rank for rank, (theirs, _) in enumerate(everyone) if theirs != everyone[0][0]]
    if odd:
        raise DivergedError(
            f"parameters of rank {', '.join(map(str, odd))} differ from rank 0's before the first step: call "
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before it"
        )
    if all(created for _, created in everyone):
        optimizer.state.clear()


def reducer_of(
    world: World, optimizer: torch.optim.Optimizer, chain: Chain, *, compression: Any, passes: int
) -> Reducer:
    """Return what averages a script's gradients: the chain's, and at every cut those that only the optimizer has."""
    known = {parameter for _, parameter in chain.named_parameters()}
    others = [p for group in optimizer.param_groups for p in group["params"] if p not in known and p.requires_grad]
    return Reducer(
        world,
        compression=compression_of(compression),
        backward_passes_per_step=passes,
        starts_itself=True,
        always=[(f"beside.{number}", parameter) for number, parameter in enumerate(others)],
    )
