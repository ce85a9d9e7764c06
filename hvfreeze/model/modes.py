"""Context managers that restore a model's modes, precision, buffers and gradients, and torch's random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module of `model` afterwards."""
    # The `train` of a frozen module holds the mode that the script has asked for.
    modes = [(module, module.training, module.__dict__.get("train")) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode, train in modes:
            module.training = mode
            if train is not None:
                module.__dict__["train"] = train


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Set every module to evaluation mode, also if `train()` is overridden, and restore its mode afterwards."""
    with modes_kept(model):
        for module in model.modules():
            module.training = False
        yield


def in_precision(precision: str) -> torch.autocast:
    """Return the context for computing in `float32`, or in `bfloat16` by autocast."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16")


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restore the modes, buffers and gradients of `model` and the state of torch's generator afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # Set them on their modules too: a forward pass may replace a buffer's tensor.
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
        for held, name, buffer, value in buffers:
            # Through `data`, because a write would count as a change of a frozen buffer.
            buffer.data.copy_(value)
            held[name] = buffer
