"""Makes the replicas of a model equal, averages their running statistics, and checks that they stay equal."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hvfreeze.comm.agreement import PACK_BYTES, packs_of
from hvfreeze.comm.world import World
from hvfreeze.errors import DivergedError
from hvfreeze.wording import plural


def broadcast_model(model: nn.Module, world: World) -> None:
    """Make all parameters and buffers equal to rank 0's; before the optimizer's first step. Collective.

    Raises:
        DivergedError: a rank's model has other parameters or buffers than rank 0's; on all ranks.
    """
    broadcast_tensors({**model.state_dict(), **non_persistent_buffers(model)}, world)


def non_persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `state_dict` omits, by name."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


@torch.no_grad()
def broadcast_tensors(named: Mapping[str, Tensor], world: World) -> None:
    """Make tensors of any types equal to rank 0's, in place. Collective.

    Raises:
        DivergedError: a rank has other names, types or shapes than rank 0; on all ranks.
    """
    if world.size == 1:
        return
    local = "\n".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named.items())
    layouts = world.allgather_object(hashlib.sha256(local.encode()).hexdigest(), name="initial")
    other = [rank for rank, layout in enumerate(layouts) if layout != layouts[0]]
    if other:
        raise DivergedError(
            f"the model of rank {other[0]} has other parameters or buffers than that of rank 0; build the same "
            "model on every rank"
        )
    filled = [tensor for tensor in named.values() if tensor.numel()]
    for number, tensors in enumerate(packs_of(filled, lambda tensor: tensor.nbytes, PACK_BYTES)):
        bytes_of = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        packed = torch.cat(bytes_of) if len(tensors) > 1 else bytes_of[0]
        world.broadcast_(packed, name=f"initial.{number}")
        for tensor, part in zip(tensors, packed.split([len(each) for each in bytes_of])):
            # A view as another type must be aligned to its element size, which a slice may not be.
            aligned = part if part.data_ptr() % tensor.element_size() == 0 else part.clone()
            # Skip equal values: some buffers cannot be written, such as expanded ones.
            if not torch.equal(tensor.contiguous().view(-1).view(torch.uint8), part):
                tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))


def parameter_digest(model: nn.Module) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of all parameters and buffers, in hexadecimal."""
    return tensor_digest([*model.named_parameters(), *model.named_buffers()])


def tensor_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of tensors, in hexadecimal."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def check_replicas(model: nn.Module, world: World, *, step: int) -> str:
    """Return the digest of the model, after running statistics have been averaged. Collective.

    Raises:
        DivergedError: parameters or buffers differ; the message names the ranks in the minority, or the buffer.
    """
    digests = world.allgather_object(parameter_digest(model), name="replica.digest")
    common, count = Counter(digests).most_common(1)[0]
    if count < world.size:
        odd = [rank for rank, digest in enumerate(digests) if digest != common]
        named = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} differ"
        who = named if count > 1 else "all ranks differ"
        why = explain_difference(model.named_parameters(), model.named_buffers(), world)
        raise DivergedError(f"replicas differ after step {step}: {who}; {why}")
    return common


def check_buffers(
    named: Iterable[tuple[str, Tensor]], modules: Iterable[nn.Module], world: World, *, step: int
) -> None:
    """Raise DivergedError if buffers other than running statistics differ between the ranks that hold them. Collective.

    Names are the same on all ranks; `modules` contain the buffers. Nothing is sent if there are no such buffers.

    Raises:
        DivergedError: the message names the buffer; on all ranks.
    """
    others = other_buffers(named, modules)
    found = find_differing(others, world) if others and world.size > 1 else []
    if found:
        raise DivergedError(f"replicas differ after step {step}: {buffers_differ(found)}")


def explain_difference(
    parameters: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]], world: World
) -> str:
    """Return the reason why tensors that are known to differ between ranks do so. Collective."""
    found = [] if find_differing(parameters, world) else find_differing(buffers, world)
    return buffers_differ(found) if found else "only the optimizer may change parameters"


def find_differing(named: Iterable[tuple[str, Tensor]], world: World) -> list[str]:
    """Return the names of tensors that differ between the ranks that hold them; equal everywhere. Collective."""
    # A tensor of another rank is empty here.
    local = {name: tensor_digest([(name, tensor)]) for name, tensor in named if tensor.numel()}
    first: dict[str, str] = {}
    gathered = world.allgather_object(local, name="replica.tensors")
    each = [pair for theirs in gathered for pair in theirs.items()]
    return list(dict.fromkeys(name for name, digest in each if first.setdefault(name, digest) != digest))


def buffers_differ(names: Sequence[str]) -> str:
    """Return the error message for buffers that differ between ranks."""
    more = "" if len(names) == 1 else f" (and {plural(len(names) - 1, 'other')})"
    return (
        f"buffer {names[0]}{more} differs between ranks; only running statistics of BatchNorm and InstanceNorm are "
        "averaged. Remove the buffer from the model, or train one replica (one rank, or --strategy grid --replicas "
        "1)"
    )


def running_statistics(modules: Iterable[nn.Module], kind: type[_NormBase] = _NormBase) -> list[tuple[Tensor, Tensor]]:
    """Return (mean, variance) of every BatchNorm and InstanceNorm (or `kind`) that has both, in module order."""
    norms = [module for module in modules if isinstance(module, kind)]
    return [(n.running_mean, n.running_var) for n in norms if n.running_mean is not None and n.running_var is not None]


def other_buffers(named: Iterable[tuple[str, Tensor]], modules: Iterable[nn.Module]) -> list[tuple[str, Tensor]]:
    """Return the buffers in `named` that belong to no BatchNorm or InstanceNorm among `modules`."""
    norms = [module for module in modules if isinstance(module, _NormBase)]
    theirs = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return [(name, buffer) for name, buffer in named if id(buffer) not in theirs]


def average_running_statistics(modules: Iterable[nn.Module], world: World) -> int:
    """Average running means and variances over ranks; return the bytes that this rank sent. Collective.

    The mean becomes m = avg(m_r), the mean over ranks. The variance becomes the pooled variance of the ranks' batches,
    avg(v_r) + avg((m_r - m)^2), by the law of total variance. Both are computed in float64. If all ranks already hold
    equal values, the result has the same bits, so averaging twice changes nothing. InstanceNorm's variance is that
    within samples; pooling adds the variance of the ranks' means, which is small if ranks see similar samples.
    """
    return StatisticsAverage(modules, world).finish()


class StatisticsAverage:
    """A running `average_running_statistics`, which lets a rank do other work meanwhile.

    The constructor starts the first message. `go_on` waits for it and starts the second. `finish` waits for the second
    and writes the averages. Each is a collective. The statistics must not change before `finish` has returned.
    """

    def __init__(self, modules: Iterable[nn.Module], world: World) -> None:
        self._statistics, self._world = running_statistics(modules) if world.size > 1 else [], world
        self._gone_on = not self._statistics
        if self._statistics:
            means, variances = zip(*self._statistics, strict=True)
            self._means, self._variances = packed(means), packed(variances)
            self._sum = self._means.clone()
            self._handle = world.start_allreduce_(self._sum, name="batchnorm.mean")

    def go_on(self) -> None:
        """Wait for the first message and start the second; optional before `finish`. Collective."""
        if not self._gone_on:
            self._gone_on = True
            self._world.wait(self._handle)
            self._mean = self._sum / self._world.size
            self._sum = self._variances + (self._means - self._mean) ** 2
            self._handle = self._world.start_allreduce_(self._sum, name="batchnorm.variance")

    def finish(self) -> int:
        """Write the averages; return the bytes that this rank sent. Collective."""
        if not self._statistics:
            return 0
        self.go_on()
        self._world.wait(self._handle)
        pooled, sizes = self._sum / self._world.size, [len(mean) for mean, _ in self._statistics]
        for (target_mean, target_variance), own, its in zip(
            self._statistics, self._mean.split(sizes), pooled.split(sizes), strict=True
        ):
            for target, value in ((target_mean, own), (target_variance, its)):
                # Skip equal values: another optimizer may have frozen the block, and would notice a write.
                if not torch.equal(target, value.to(target.dtype)):
                    target.copy_(value)
        return 2 * self._means.nbytes


def packed(tensors: Iterable[Tensor]) -> Tensor:
    """Return the elements of all tensors, concatenated, as float64 of shape (elements,)."""
    return torch.cat([tensor.flatten() for tensor in tensors]).double()


def pooled_statistics(means: Sequence[Tensor], variances: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the pooled running mean and variance of several ranks' batches; see `average_running_statistics`."""
    stacked = torch.stack(list(means)).double()
    mean = stacked.mean(0)
    variance = torch.stack(list(variances)).double().mean(0) + ((stacked - mean) ** 2).mean(0)
    return mean.to(means[0].dtype), variance.to(variances[0].dtype)
