"""Steps under `torch.amp.GradScaler`, which passes its scale and an overflow flag to the optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hvfreeze.comm.reducer import hook_on


class LossScale:
    """The loss scale of the current step's gradients, also after the script has unscaled them.

    `GradScaler.unscale_` does not notify the optimizer, so one gradient is compared with its earlier value. If it is
    clipped as well, clipping counts as part of the scale.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch the gradient of the last parameter, which is usually the head's bias, and small."""
        # A group may be empty: frozen parameters are in none.
        self._parameter: Tensor = [tensor for group in optimizer.param_groups for tensor in group["params"]][-1]
        self._norm = 0.0
        takes_hook = self._parameter.is_floating_point() or self._parameter.is_complex()
        self._hooks = [hook_on(self._parameter, lambda parameter: self.note())] if takes_hook else []

    def note(self) -> None:
        """Store the current gradient as scaled, at the end of a backward pass and of an exchange."""
        self._norm = self._now()

    def given(self, grad_scale: Tensor | None) -> float:
        """Return the scale that a `GradScaler` has passed, or has divided the gradients by."""
        if grad_scale is not None:
            return float(grad_scale)
        scale = self._norm / self._now() if self._now() else math.nan
        return scale if math.isfinite(scale) and scale > 0 else 1.0

    def close(self) -> None:
        """Stop watching the gradient."""
        for hook in self._hooks:
            hook.remove()

    def _now(self) -> float:
        gradient = self._parameter.grad
        return 0.0 if gradient is None else float(torch.linalg.vector_norm(values_of(gradient)))


def step_scaled(optimizer: torch.optim.Optimizer, *, grad_scale: Tensor | None, found_inf: Tensor) -> Any:
    """Make a step with gradients that are `grad_scale` times too large, like `GradScaler.step`; None is 1.

    Call it only if `found_inf` is 0. Return the result of the optimizer's step.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf  # type: ignore[attr-defined]
        try:
            return optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    if grad_scale is not None:
        inverse = grad_scale.double().reciprocal().float()
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                values_of(parameter.grad).mul_(inverse)
    return optimizer.step()


def values_of(gradient: Tensor) -> Tensor:
    """Return the values of a gradient, which may be sparse."""
    return gradient._values() if gradient.is_sparse else gradient
