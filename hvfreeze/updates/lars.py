"""LARS: SGD with momentum in which every tensor moves in proportion to its own size.

You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks (2017, arXiv 1708.03888), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

TRUST = 0.001
"""The part of its norm by which a tensor moves in a step, at learning rate 1 and without momentum."""


class LARS(torch.optim.Optimizer):
    """Updates v <- momentum v + lr ratio (g + decay w), w <- w - v, with ratio = trust |w| / (|g| + decay |w|).

    Where a tensor or its gradient is zero, the ratio is `trust` alone, so that biases that start at zero do move.

    Args:
        params: tensors, or groups of them, as for every torch optimizer.
        lr: learning rate; it is part of what the momentum remembers, as in the paper.
        momentum: of the update.
        weight_decay: weight decay.
        trust: the paper's eta.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = TRUST,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make an update of every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        decay, gradient = group["weight_decay"], parameter.grad
        assert gradient is not None
        # In float64, so that the order of a sum hardly ever shows in a ratio that is used in float32.
        size = torch.linalg.vector_norm(parameter, dtype=torch.float64).item()
        slope = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
        ratio = group["trust"] * (size / (slope + decay * size) if size and slope else 1.0)
        state = self.state[parameter]
        if not state:
            state["velocity"] = torch.zeros_like(parameter)
        velocity = state["velocity"].mul_(group["momentum"]).add_(gradient, alpha=group["lr"] * ratio)
        if decay:
            velocity.add_(parameter, alpha=group["lr"] * ratio * decay)
        parameter.sub_(velocity)
