"""Which submodules a forward pass calls, in which order, and which called which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.errors import UsageError

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""A batch of a model's inputs: one tensor, or what `model(*inputs)` or `model(**inputs)` takes."""


@dataclass(frozen=True)
class Call:
    """One call of a submodule.

    Attributes:
        name: of the submodule, as in `model.named_modules()`.
        parent: the submodule that called it, "" for the model itself.
        output: what it gave.
    """

    name: str
    parent: str
    output: Any


@dataclass
class _Watch:
    calls: list[Call] = field(default_factory=list)
    active: list[str] = field(default_factory=list)


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Return what `model` gives for a batch of its inputs."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def watch(model: nn.Module, example: Inputs) -> list[Call]:
    """Return the calls of `model`'s submodules for a batch of its inputs, in the order in which they ended.

    The model runs once, in evaluation mode and with gradients; modes, buffers and random state stay as they were.

    Raises:
        UsageError: it cannot run on `example`.
    """
    seen, hooks = _Watch(), []
    for name, module in model.named_modules():
        if name:
            hooks += [module.register_forward_pre_hook(_entering(seen, name)), _leaving(seen, name, module)]
    try:
        with in_evaluation(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
            call(model, example)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise UsageError(
            f"example: {type(model).__name__} cannot run on it ({error}); give a batch of its inputs, as a tensor, a "
            "tuple for model(*inputs) or a dict for model(**inputs)"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return seen.calls


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and back into its own afterwards."""
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _entering(seen: _Watch, name: str) -> Any:
    return lambda module, inputs: seen.active.append(name)


def _leaving(seen: _Watch, name: str, module: nn.Module) -> Any:
    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.active.pop()
        seen.calls.append(Call(name, seen.active[-1] if seen.active else "", output))

    return module.register_forward_hook(leave)
