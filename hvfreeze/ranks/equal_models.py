"""What makes the replicas of a model equal, keeps them so, and tells whether they are."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.errors import DivergedError
from hvfreeze.ranks.world import World

PACKED_BYTES = 2**25
"""Of small tensors that travel as one: each message waits for all ranks, and models have hundreds of tensors."""


def broadcast_model(model: nn.Module, world: World) -> None:
    """Make all parameters and buffers equal to rank 0's.

    Collective: every rank of `world` must call this, before the optimizer's first step.

    Raises:
        DivergedError: a rank's model has other parameters or buffers than rank 0's; on all ranks.
    """
    if world.size == 1:
        return
    state = model.state_dict()
    mine = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in state.items()]
    _require_equal(world.allgather_object(hashlib.sha256("\n".join(mine).encode()).hexdigest(), name="initial"))
    for number, tensors in enumerate(_packs(state.values())):
        bytes_of = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        packed = torch.cat(bytes_of) if len(tensors) > 1 else bytes_of[0]
        world.broadcast_(packed, name=f"initial.{number}")
        for tensor, part in zip(tensors, packed.split([len(each) for each in bytes_of])):
            # A view of another type must begin at a multiple of its size, which a part of the whole need not.
            aligned = part if part.data_ptr() % tensor.element_size() == 0 else part.clone()
            tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))


def _require_equal(layouts: Sequence[str]) -> None:
    other = [rank for rank, layout in enumerate(layouts) if layout != layouts[0]]
    if other:
        raise DivergedError(
            f"the model of rank {other[0]} has other parameters or buffers than rank 0's: "
            "every rank must build the same model before it is made equal"
        )


def _packs(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors in their order, as many together as `PACKED_BYTES` hold, one at least."""
    pack: list[Tensor] = []
    taken = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes and pack and taken + nbytes > PACKED_BYTES:
            yield pack
            pack, taken = [], 0
        if nbytes:
            pack.append(tensor)
            taken += nbytes
    if pack:
        yield pack


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
