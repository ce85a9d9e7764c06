"""Running statistics of BatchNorm: the one thing that replicas do not share by exchanging gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.ranks.world import World


def running_statistics(modules: Iterable[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Return (mean, variance) of every BatchNorm that tracks them, in module order."""
    norms = [module for module in modules if isinstance(module, _BatchNorm)]
    return [(n.running_mean, n.running_var) for n in norms if n.running_mean is not None and n.running_var is not None]


def average_running_statistics(modules: Iterable[nn.Module], world: World) -> int:
    """Make running means and variances equal on all ranks; return the bytes that this rank sent.

    The mean becomes the mean over ranks, m = avg(m_r). The variance becomes that of the ranks' batches pooled,
    avg(v_r) + avg((m_r - m)^2), the law of total variance. Computed in float64; where all ranks hold equal values
    already, the result is these values, bit for bit, so that averaging twice changes nothing.

    Collective: every rank of `world` must call this.
    """
    statistics = running_statistics(modules)
    if world.size == 1 or not statistics:
        return 0
    means = torch.cat([mean.double().flatten() for mean, _ in statistics])
    variances = torch.cat([variance.double().flatten() for _, variance in statistics])
    mean = world.allreduce_sum(means, name="batchnorm.mean") / world.size
    pooled = world.allreduce_sum(variances + (means - mean) ** 2, name="batchnorm.variance") / world.size
    offset = 0
    for target_mean, target_variance in statistics:
        end = offset + target_mean.numel()
        target_mean.copy_(mean[offset:end].view_as(target_mean))
        target_variance.copy_(pooled[offset:end].view_as(target_variance))
        offset = end
    return 2 * means.numel() * means.element_size()
