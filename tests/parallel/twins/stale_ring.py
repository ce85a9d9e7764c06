"""Training with gradients that are some steps old, as one process does it: what a ring of ranks must equal.

The rule of Ouroboros (Yang et al., NeurIPS 2019, arXiv 1909.06695) and of DDG before it (Huo et al., ICML 2018, arXiv
1804.10574), written with PyTorch and nothing of the strategy. A model is K modules, one after another. In step t the
gradient of the whole loss is found for batch t, by ordinary backpropagation through a copy of the model as it is then;
module k is updated by what was found K-k steps before. A matrix that the first and the last module share gets what its
first use was given K-1 steps before, and what its last use is given now: their sum, or half of it. Up to a step all
gradients are new; what was found then is not used again. A module without a gradient as yet stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn


class StaleRing:
    """One model in one process.

    Args:
        model: at its start.
        logits: (a copy of the model, the shared matrix as the last module uses it, inputs) -> logits.
        delays: by the name of a parameter, K-k of its module.
        shared: the name of the matrix that both ends use; None where there is none.
        half: whether its gradient is half the sum.
        stale_after: steps at the start whose gradients are new.
        open_optimizer: parameters -> a torch optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        logits: Callable[[nn.Module, Tensor, Tensor], Tensor],
        *,
        delays: Mapping[str, int],
        shared: str | None,
        half: bool,
        stale_after: int,
        open_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.model, self._logits, self._delays = model, logits, delays
        self._shared, self._half, self._stale_after = shared, half, stale_after
        self.optimizer = open_optimizer(list(model.parameters()))
        self._found: list[tuple[dict[str, Tensor], Tensor | None]] = []

    def step(self, inputs: Tensor, labels: Tensor) -> float:
        """Make a step; return the loss."""
        now, copy = len(self._found), deepcopy(self.model).train()
        shared = copy.get_parameter(self._shared) if self._shared else torch.zeros(())
        last = shared.detach().clone().requires_grad_()
        loss = nn.functional.cross_entropy(self._logits(copy, last, inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        # Statistics of a forward pass belong to it, whenever its gradient is used.
        for mine, seen in zip(self.model.buffers(), copy.buffers(), strict=True):
            mine.copy_(seen)
        gradients = {name: parameter.grad for name, parameter in copy.named_parameters()}
        self._found.append((gradients, last.grad))  # type: ignore[arg-type]
        for name, parameter in self.model.named_parameters():
            parameter.grad = self._gradient(name, now)
        self.optimizer.step()
        return loss.item()

    def _gradient(self, name: str, now: int) -> Tensor | None:
        batch = now if now < self._stale_after else now - self._delays[name]
        known = batch >= self._stale_after or now < self._stale_after
        gradient = self._found[batch][0][name] if known else None
        if name != self._shared:
            return gradient
        other = self._found[now][1]
        assert other is not None
        total = other if gradient is None else gradient + other
        return total * 0.5 if self._half else total
