"""One module of the ring: its blocks, and the batches between their forward and backward passes.

A backward pass that comes some updates later must use the parameters of its forward pass. So the forward pass of a
waiting batch runs on copies of them, which belong to the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import modes_kept
from hvfreeze.model.segments import Segment
from hvfreeze.prefix.features import Halves

Weights = dict[str, Tensor]
"""Tensors by parameter name."""


class Pieces(nn.Module):
    """Runs blocks of a chain as a module, so that its parameters can be replaced for one call."""

    def __init__(self, halves: Halves) -> None:
        super().__init__()
        self.model = halves.chain.model
        self._halves = halves

    def forward(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of blocks start..stop-1 for `x`."""
        return self._halves.part(x, start, stop)


@dataclass(frozen=True, eq=False)
class Pass:
    """A batch between its forward and its backward pass."""

    input: Tensor
    """Input; has the gradient in `grad` after the backward pass, if it is floating point."""
    output: Tensor
    weights: Weights
    """Its copies of the parameters; empty if it uses the parameters themselves."""
    random: Tensor
    """The state of torch's generator before it."""


@dataclass(eq=False)
class RingModule:
    """Blocks lo..hi-1 of the chain as module `number` of the ring, from 0."""

    number: int
    segment: Segment
    halves: Halves
    tied: tuple[str, ...] = ()
    """Names of parameters of other modules that these blocks use too."""
    _passes: dict[int, Pass] = field(default_factory=dict)
    """Pending batches by number."""

    def __post_init__(self) -> None:
        self._pieces = Pieces(self.halves)

    @property
    def chain(self) -> Chain:
        """The whole model in blocks."""
        return self.halves.chain

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that these blocks use."""
        used = [*self.chain.named_parameters(*self.segment)]
        return used + [(name, self.chain.model.get_parameter(name)) for name in self.tied]

    @property
    def waiting(self) -> int:
        """Number of batches between their forward and backward passes."""
        return len(self._passes)

    def forward(self, x: Tensor, batch: int, *, waits: bool) -> Tensor:
        """Return the output for `x`, and keep what the backward pass needs.

        Args:
            x: the input; gets the gradient of this module's input if it is floating point, unless the module is the
                first.
            batch: its number.
            waits: parameters are updated before the backward pass.
        """
        random = torch.get_rng_state()
        weights = {name: copy_of(parameter) for name, parameter in self.named} if waits else {}
        self._passes[batch] = self._run(x, weights, random)
        return self._passes[batch].output

    def backward(self, batch: int, error: Tensor | None) -> Tensor | None:
        """Add the gradients of a batch to those of the parameters; return the gradient of its input, if it has one.

        Args:
            batch: its number.
            error: gradient of the output; None if that is a loss.
        """
        done = self._passes.pop(batch)
        done.output.backward(error)
        for name, parameter in self.named if done.weights else []:
            gradient = done.weights[name].grad
            if gradient is not None and parameter.requires_grad:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return done.input.grad

    def replace_output(self, batch: int, output: Tensor) -> None:
        """Start the backward pass of a batch at a value computed from its output, such as a loss."""
        self._passes[batch] = replace(self._passes[batch], output=output)

    def state_dict(self) -> dict[int, Any]:
        """Return the waiting batches: input, weights and random state of each, to recompute its forward pass."""
        return {
            batch: {
                "input": done.input.detach(),
                "weights": {name: weight.detach() for name, weight in done.weights.items()},
                "random": done.random,
            }
            for batch, done in self._passes.items()
        }

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Recompute the forward passes of a state, without updating running statistics again."""
        self._passes.clear()
        for batch, kept in state.items():
            weights = {name: copy_of(weight) for name, weight in kept["weights"].items()}
            with modes_kept(self.chain.model), torch.random.fork_rng(devices=[]):
                self.chain.model.train()
                torch.set_rng_state(kept["random"])
                buffers = {name: buffer.clone() for name, buffer in self.chain.named_buffers(*self.segment)}
                self._passes[batch] = self._run(kept["input"], weights, kept["random"], buffers)

    def stash_bytes(self) -> int:
        """Return the bytes of the parameter copies of batches, without their activations."""
        return sum(weight.nbytes for done in self._passes.values() for weight in done.weights.values())

    def _run(self, x: Tensor, weights: Weights, random: Tensor, buffers: Mapping[str, Tensor] | None = None) -> Pass:
        x = x.detach()
        if self.number > 0:
            x = x.requires_grad_()
        replaced = {f"model.{name}": weight for name, weight in {**weights, **(buffers or {})}.items()}
        y: Tensor = functional_call(self._pieces, replaced, (x, *self.segment))
        return Pass(x, y, weights, random)


def copy_of(weight: Tensor) -> Tensor:
    """Return a copy with the same memory layout that requires a gradient if the original does."""
    return weight.detach().clone().requires_grad_(weight.is_floating_point())
