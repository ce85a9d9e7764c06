"""Compatibility with Horovod scripts: arguments of its optimizer, and how scripts make ranks equal."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.comm.gradient_exchange import Scaling
from hvfreeze.comm.replica_sync import broadcast_tensors
from hvfreeze.comm.world import World
from hvfreeze.config.freeze import CRITERIA, FreezeConfig
from hvfreeze.config.optimizer import parse_compression
from hvfreeze.errors import ArgumentError, UsageError
from hvfreeze.freezing.cadence import check_schedules
from hvfreeze.integration.script_world import log

COMPRESSORS = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
"""Horovod's compressors by name."""
BROADCAST = "horovod.torch.functions"
"""The module whose `broadcast_optimizer_state` calls `step` to create an optimizer's state."""


def compression_of(value: Any) -> str:
    """Return none, fp16 or powersgd:R, given one of these or a class of `hvd.Compression`.

    Raises:
        UsageError: it is neither.
    """
    known = COMPRESSORS.get(getattr(value, "__name__", ""), value)
    if not isinstance(known, str) or known == "auto":
        raise UsageError(
            f"compression ({value}) must be none, fp16, powersgd:R, hvd.Compression.none or hvd.Compression.fp16"
        )
    parse_compression(known)
    return known


def check_arguments(
    optimizer: torch.optim.Optimizer,
    settings: FreezeConfig,
    *,
    steps_per_epoch: int | None,
    num_epochs: int | None,
    passes: int,
) -> None:
    """Raise UsageError for arguments with which no vote can be held."""
    if hasattr(optimizer, "skip_synchronize"):
        raise UsageError(
            "optimizer is already a DistributedOptimizer, and both would average the gradients; pass the optimizer "
            "that it wraps"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS is not supported, because it evaluates a different number of times on each rank; "
            "use another optimizer"
        )
    if settings.auto:
        raise UsageError(
            f"freeze (auto) must be one of none, static, {', '.join(CRITERIA)} in a training script; 'hvfreeze "
            "auto' runs a whole training"
        )
    for name, value in (("steps_per_epoch", steps_per_epoch), ("num_epochs", num_epochs)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} ({value}) must be a whole number of at least 1")
    check_schedules(settings, steps_per_epoch=steps_per_epoch, num_epochs=num_epochs)
    if passes < 1:
        raise ArgumentError(f"backward_passes_per_step ({passes}) must be at least 1")


def scaling_of(op: Any, gradient_predivide_factor: float, *, size: int) -> Scaling:
    """Return the scaling of gradients for `op`: the average over ranks, or `hvd.Sum`.

    Raises:
        UsageError: another operation.
        ArgumentError: a predivide factor without an average.
    """
    hvd: Any = sys.modules.get("horovod.torch")
    factor = gradient_predivide_factor
    known = {getattr(hvd, name): name for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")} if hvd else {}
    name = "Average" if op is None else known.get(op, str(op))
    if name not in ("Average", "Sum"):
        raise UsageError(
            f"op ({name}) must be hvd.Average or hvd.Sum, because votes use the sum of gradients over ranks"
        )
    if factor != 1.0 and name == "Sum":
        raise ArgumentError(
            f"gradient_predivide_factor ({factor}) splits the division of an average, so op must be hvd.Average"
        )
    if name == "Sum":
        return Scaling(1.0)
    return Scaling.mean(size) if factor == 1.0 else Scaling(1 / factor, factor / size)


def check_groups(groups: Any, num_groups: int) -> None:
    """Raise ArgumentError for groups of gradients that Horovod would refuse.

    Raises:
        ArgumentError: they are neither a number nor lists of parameters, or contain one twice.
    """
    if num_groups:
        message = "num_groups is groups in Horovod since version 0.21"
        warnings.warn(message, DeprecationWarning, stacklevel=7)  # the script's line, behind `raise_on_all_ranks`
    asked = groups if groups is not None else num_groups or None
    if isinstance(asked, list):
        members = [member for group in asked for member in group]
        if any(not isinstance(member, Tensor) for member in members):
            raise ArgumentError("groups must be a number or lists of parameters")
        if len({id(member) for member in members}) < len(members):
            raise ArgumentError("groups: a parameter must not be in two groups")
    elif asked is not None and (not isinstance(asked, int) or asked < 1):
        raise ArgumentError(f"groups ({asked!r}) must be a number of at least 1, or lists of parameters")


def names_of(optimizer: torch.optim.Optimizer, named_parameters: Any) -> dict[Tensor, str]:
    """Return each parameter's name as Horovod's optimizer has it.

    Raises:
        ArgumentError: `named_parameters` has no pairs, a name twice, or not all parameters of the optimizer.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if named_parameters is None:
        return {p: f"allreduce.noname.{i}.{j}" for i, group in enumerate(groups) for j, p in enumerate(group)}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ArgumentError("named_parameters must be (name, parameter) tuples, as model.named_parameters() gives them")
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ArgumentError(f"named_parameters ({', '.join(twice)}): names must be unique")
    names = {parameter: name for name, parameter in pairs}
    lacking = sum(parameter not in names for group in groups for parameter in group)
    if lacking:
        raise ArgumentError(
            f"named_parameters lacks {lacking} of the optimizer's parameters; pass all, or leave it out, because "
            "model= has the names"
        )
    return names


def is_broadcast() -> bool:
    """Return True if `hvd.broadcast_optimizer_state` called the optimizer; a scheduler may stand in between."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):
        if frame is None or frame.f_globals.get("__name__") == BROADCAST:
            return frame is not None
        frame = frame.f_back
    return False


def create_state(optimizer: torch.optim.Optimizer, world: World) -> list[Tensor]:
    """Create missing optimizer state, as `hvd.broadcast_optimizer_state` needs it; return its parameters.

    Ranks that have loaded a state broadcast it to ranks that have created one, so both must have the same entries.
    Unlike a step, this changes no weight. With one process there is nothing to send or create.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    lacking = [parameter for parameter in parameters if not optimizer.state.get(parameter)]
    if world.size == 1 or not lacking:
        return []
    gradients = [parameter.grad for parameter in parameters]
    before = [parameter.detach().clone() for parameter in lacking]
    for parameter in parameters:
        parameter.grad = None
    for parameter in lacking:
        zero = torch.zeros_like(parameter)
        parameter.grad = zero.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else zero
    optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(lacking, before):
            parameter.copy_(value)
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    return lacking


def synchronize_start(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], world: World, *, created: Collection[Tensor]
) -> None:
    """Make ranks start from rank 0's tensors, and from no state unless it was loaded.

    Collective: every rank of `world` must call this.

    Args:
        optimizer: the optimizer of the state.
        named: all parameters and buffers; buffers such as running statistics may differ.
        world: the ranks.
        created: parameters whose state `create_state` has created; it is dropped if that is so on all ranks.

    Raises:
        DivergedError: ranks have other parameters or buffers than rank 0.
    """
    parameters = [(name, tensor) for name, tensor in named.items() if isinstance(tensor, nn.Parameter)]
    digest = digest_tensors(parameters) if world.size > 1 else ""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = {place for place, parameter in enumerate(held) if parameter in created}
    gathered = world.allgather_object((digest, places), name="optimizer.begin")
    odd = [rank for rank, (theirs, _) in enumerate(gathered) if theirs != gathered[0][0]]
    if odd:
        broadcast_tensors({name: tensor.detach() for name, tensor in named.items()}, world)
        log(
            world,
            "parameters of %s differed from rank 0 before the first step and are now equal to rank 0; call "
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before it to make the first step equal too",
            f"rank {', '.join(map(str, odd))}",
            level=logging.WARNING,
        )
    for place in set.intersection(*[theirs for _, theirs in gathered]):
        optimizer.state.pop(held[place], None)


def beside(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the optimizer's parameters that the model does not have, with generated names."""
    known = set(model.parameters())
    others = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
    return [(f"beside.{number}", p) for number, p in enumerate(others) if p.is_floating_point() or p.is_complex()]
