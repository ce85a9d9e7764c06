"""What makes the replicas of a model equal, keeps them so, and tells whether they are."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.errors import DivergedError
from hvfreeze.ranks.world import World


def broadcast_model(model: nn.Module, world: World) -> None:
    """Make all parameters and buffers equal to rank 0's.

    Collective: every rank of `world` must call this, before the optimizer's first step.
    """
    for name, tensor in model.state_dict().items():
        whole = tensor.contiguous()
        world.broadcast_(whole, name=f"initial.{name}")
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


def parameter_digest(model: nn.Module) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of all parameters and buffers, as hex."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy())
    return digest.hexdigest()


def check_replicas(model: nn.Module, world: World, *, step: int) -> str:
    """Return the digest that all ranks share.

    Collective: every rank of `world` must call this, when running statistics have been averaged.

    Raises:
        DivergedError: parameters or buffers differ; the message names the ranks in the minority.
    """
    digests = world.allgather_object(parameter_digest(model), name="replica.digest")
    common, count = Counter(digests).most_common(1)[0]
    if count < world.size:
        odd = [rank for rank, digest in enumerate(digests) if digest != common]
        named = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} differ"
        who = named if count > 1 else "all ranks differ"
        raise DivergedError(f"replicas are not equal after step {step}: {who}; parameters must change by updates only")
    return common


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
