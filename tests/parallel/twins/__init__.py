"""The strategies as one process runs them, written with PyTorch and nothing of the strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""Inputs and labels."""


@torch.no_grad()
def pool(models: Sequence[nn.Module]) -> None:
    """Give every copy of a model the running statistics of all: mean of means, and the law of total variance."""
    for norms in zip(*[[m for m in each.modules() if hasattr(m, "running_mean")] for each in models], strict=True):
        pool_norms(norms, [(norm.running_mean, norm.running_var) for norm in norms])


@torch.no_grad()
def pool_norms(norms: Sequence[Any], seen: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give norms the mean and the variance of what several have seen."""
    means, variances = ([each[part].double() for each in seen] for part in (0, 1))
    mean = sum(means[1:], means[0]) / len(seen)
    spreads = [variance + (own - mean) ** 2 for variance, own in zip(variances, means, strict=True)]
    variance = sum(spreads[1:], spreads[0]) / len(seen)
    for norm in norms:
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
