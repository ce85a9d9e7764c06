"""What makes the replicas of a model equal, keeps them so, and tells whether they are."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hvfreeze.comm.agreement import packs_of
from hvfreeze.comm.world import World
from hvfreeze.errors import DivergedError
from hvfreeze.wording import plural

PACKED_BYTES = 2**25
"""Of small tensors that travel as one: each message waits for all ranks, and models have hundreds of tensors."""


def broadcast_model(model: nn.Module, world: World) -> None:
    """Make all parameters and buffers equal to rank 0's; before the optimizer's first step. Collective.

    Raises:
        DivergedError: a rank's model has other parameters or buffers than rank 0's; on all ranks.
    """
    broadcast_tensors(model.state_dict(), world)


@torch.no_grad()
def broadcast_tensors(named: Mapping[str, Tensor], world: World) -> None:
    """Make tensors of any types equal to rank 0's, in place. Collective.

    Raises:
        DivergedError: a rank has other names, types or shapes than rank 0; on all ranks.
    """
    if world.size == 1:
        return
    mine = "\n".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named.items())
    layouts = world.allgather_object(hashlib.sha256(mine.encode()).hexdigest(), name="initial")
    other = [rank for rank, layout in enumerate(layouts) if layout != layouts[0]]
    if other:
        raise DivergedError(
            f"the model of rank {other[0]} has other parameters or buffers than rank 0's: "
            "every rank must build the same model before it is made equal"
        )
    filled = [tensor for tensor in named.values() if tensor.numel()]
    for number, tensors in enumerate(packs_of(filled, lambda tensor: tensor.nbytes, PACKED_BYTES)):
        bytes_of = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        packed = torch.cat(bytes_of) if len(tensors) > 1 else bytes_of[0]
        world.broadcast_(packed, name=f"initial.{number}")
        for tensor, part in zip(tensors, packed.split([len(each) for each in bytes_of])):
            # A view of another type must begin at a multiple of its size, which a part of the whole need not.
            aligned = part if part.data_ptr() % tensor.element_size() == 0 else part.clone()
            tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))


def parameter_digest(model: nn.Module) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of all parameters and buffers, as hex."""
    return tensor_digest([*model.named_parameters(), *model.named_buffers()])


def tensor_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of tensors, as hex."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def check_replicas(model: nn.Module, world: World, *, step: int) -> str:
    """Return the digest that all ranks share, when running statistics have been averaged. Collective.

    Raises:
        DivergedError: parameters or buffers differ; the message names the ranks in the minority, or the buffer.
    """
    digests = world.allgather_object(parameter_digest(model), name="replica.digest")
    common, count = Counter(digests).most_common(1)[0]
    if count < world.size:
        odd = [rank for rank, digest in enumerate(digests) if digest != common]
        named = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} differ"
        who = named if count > 1 else "all ranks differ"
        why = why_unlike(model.named_parameters(), model.named_buffers(), world)
        raise DivergedError(f"replicas are not equal after step {step}: {who}; {why}")
    return common


def check_buffers(
    named: Iterable[tuple[str, Tensor]], modules: Iterable[nn.Module], world: World, *, step: int
) -> None:
    """Refuse buffers that differ between those ranks that hold them, but for running statistics. Collective.

    Their names are the same on all ranks, and `modules` are those that have them. Nothing travels where there are none.

    Raises:
        DivergedError: the message names the buffer; on all ranks.
    """
    others = other_buffers(named, modules)
    found = unlike(others, world) if others and world.size > 1 else []
    if found:
        raise DivergedError(f"replicas are not equal after step {step}: {buffers_differ(found)}")


def why_unlike(parameters: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]], world: World) -> str:
    """Return what is wrong where some of these tensors are known to differ between ranks. Collective."""
    found = [] if unlike(parameters, world) else unlike(buffers, world)
    return buffers_differ(found) if found else "parameters must change by updates only"


def unlike(named: Iterable[tuple[str, Tensor]], world: World) -> list[str]:
    """Return the names of tensors that differ between those ranks that hold them; the same everywhere. Collective."""
    # What another rank holds is empty here.
    mine = {name: tensor_digest([(name, tensor)]) for name, tensor in named if tensor.numel()}
    first: dict[str, str] = {}
    everyone = world.allgather_object(mine, name="replica.tensors")
    each = [pair for theirs in everyone for pair in theirs.items()]
    return list(dict.fromkeys(name for name, digest in each if first.setdefault(name, digest) != digest))


def buffers_differ(names: Sequence[str]) -> str:
    """Return the refusal of buffers that differ between ranks."""
    more = "" if len(names) == 1 else f" (and {plural(len(names) - 1, 'other')})"
    return (
        f"buffer {names[0]}{more} differs between ranks: of what the samples of one rank change, only the running "
        "statistics of BatchNorm and InstanceNorm are averaged; leave such a buffer out of the model, or train one "
        "replica (one rank, or --strategy grid --replicas 1)"
    )


def running_statistics(modules: Iterable[nn.Module], kind: type[_NormBase] = _NormBase) -> list[tuple[Tensor, Tensor]]:
    """Return (mean, variance) of every BatchNorm and InstanceNorm, or `kind` of them, with both, in module order."""
    norms = [module for module in modules if isinstance(module, kind)]
    return [(n.running_mean, n.running_var) for n in norms if n.running_mean is not None and n.running_var is not None]


def other_buffers(named: Iterable[tuple[str, Tensor]], modules: Iterable[nn.Module]) -> list[tuple[str, Tensor]]:
    """Return those of the buffers `named` that are no BatchNorm's and no InstanceNorm's among `modules`."""
    norms = [module for module in modules if isinstance(module, _NormBase)]
    theirs = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return [(name, buffer) for name, buffer in named if id(buffer) not in theirs]


def average_running_statistics(modules: Iterable[nn.Module], world: World) -> int:
    """Make running means and variances equal on all ranks; return the bytes that this rank sent. Collective.

    The mean becomes the mean over ranks, m = avg(m_r). The variance becomes that of the ranks' batches pooled,
    avg(v_r) + avg((m_r - m)^2), the law of total variance. Computed in float64; where all ranks hold equal values
    already, the result is these values, bit for bit, so that averaging twice changes nothing. InstanceNorm's variance,
    which is that within samples, grows by the difference of ranks' means too: little, where they see alike samples.
    """
    return StatisticsAverage(modules, world).finish()


class StatisticsAverage:
    """`average_running_statistics` under way, so that a rank may do other things meanwhile.

    The constructor starts the first message, `go_on` waits for it and starts the second, `finish` waits for that and
    writes the averages. Each is a collective; nobody may write the statistics before `finish` has returned.
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
        """Start the second message; not needed before `finish`. Collective."""
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
                # What is equal already may be frozen by another optimizer of the model, which notices what is written.
                if not torch.equal(target, value.to(target.dtype)):
                    target.copy_(value)
        return 2 * self._means.nbytes


def packed(tensors: Iterable[Tensor]) -> Tensor:
    """Return all elements of the tensors, one tensor after the other, float64 [number of elements]."""
    return torch.cat([tensor.flatten() for tensor in tensors]).double()


def pooled_statistics(means: Sequence[Tensor], variances: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the running mean and variance of several ranks' batches together, as `average_running_statistics` does."""
    stacked = torch.stack(list(means)).double()
    mean = stacked.mean(0)
    variance = torch.stack(list(variances)).double().mean(0) + ((stacked - mean) ** 2).mean(0)
    return mean.to(means[0].dtype), variance.to(variances[0].dtype)
