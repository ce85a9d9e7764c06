"""A model's modes, precision, buffers and gradients, and torch's random state, while somebody looks at what it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Give every module of `model` its own mode back afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, also one whose `train()` is held, and back into its own afterwards."""
    with modes_kept(model):
        for module in model.modules():
            module.training = False
        yield


def in_precision(precision: str) -> torch.autocast:
    """Return the context in which blocks compute in `float32`, or by autocast in `bfloat16`."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16")


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Give `model` its modes, buffers and gradients back afterwards, and torch's generator its state."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # By their modules too: a forward pass may put another tensor in a buffer's place.
    owners = [module._buffers for module in model.modules()]
    buffers = [(held, name, kept, kept.clone()) for held in owners for name, kept in held.items() if kept is not None]
    try:
        with modes_kept(model), torch.random.fork_rng(devices=[]):
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for parameter, before in gradients:
            parameter.grad = before
        with torch.no_grad():
            for held, name, buffer, value in buffers:
                held[name] = buffer.copy_(value)
