"""A model's modes, buffers and torch's random state, kept as they were while somebody looks at what the model does."""

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


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Give `model` its modes and buffers back afterwards, and torch's generator its state."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with modes_kept(model), torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
