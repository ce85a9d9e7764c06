"""Local SGD as one process does it: what ranks that train alone and then meet must equal.

The rule of Stich (ICLR 2019, arXiv 1805.09767), written with PyTorch and nothing of the strategy. n copies of a model
make J steps each, every one on its own batches with its own optimizer. Then all copies become their mean, added up in
order; optimizers keep what they remember. BatchNorm's running statistics stay each copy's own. Who looks at the model
sees the mean of the copies as they are, with statistics pooled by the law of total variance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import nn

from tests.parallel.twins import Batch, pool


class Copies:
    """n copies of one model in one process.

    Args:
        model: at its start.
        number: of copies.
        local_steps: between two means.
        optimizer: of a copy, from its parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        number: int,
        local_steps: int,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.models = [deepcopy(model) for _ in range(number)]
        self.optimizers = [optimizer(list(each.parameters())) for each in self.models]
        self.local_steps, self.steps = local_steps, 0

    def step(self, batches: Sequence[Batch]) -> None:
        """Make a step, a batch a copy."""
        for model, optimizer, (images, labels) in zip(self.models, self.optimizers, batches, strict=True):
            model.train()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        self.steps += 1
        if self.steps % self.local_steps == 0:
            average(self.models)

    def seen(self) -> nn.Module:
        """Return the model that is evaluated and kept."""
        models = deepcopy(self.models)
        average(models)
        pool(models)
        return models[0]


@torch.no_grad()
def average(models: Sequence[nn.Module]) -> None:
    """Make all copies their mean."""
    for together in zip(*[model.parameters() for model in models], strict=True):
        mean = sum(together[1:], together[0]) / len(together)
        for parameter in together:
            parameter.copy_(mean)
