"""What a rank of a grid keeps in a checkpoint, by the names of its tensors, and how it is dealt out to another grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.segments import Segment, tensors_of
from hvfreeze.freezing.freezer import Freezer

Named = Mapping[str, Any]


def state_of(freezer: Freezer, segment: Segment) -> dict[str, Any]:
    """Return the blocks of `segment`, which this rank trains, with what their training has led to."""
    chain, optimizer, reducer = freezer.chain, freezer.optimizer, freezer.reducer
    named = chain.named_parameters(*segment)
    return {
        "tensors": {name: tensor.detach() for name, tensor in tensors_of(chain, segment)},
        "optimizer": {name: dict(optimizer.state[p]) for name, p in named if p in optimizer.state},
        "freezer": freezer.state_dict(),
        "reducer": reducer.state_dict(),
        "bytes": [reducer.payload_bytes, reducer.other_bytes],
    }


def put_back(state: Named, freezer: Freezer, segment: Segment) -> None:
    """Continue from what `state_of` returned; the tensors have their values already."""
    # The freezer first: it takes frozen parameters out of the optimizer.
    freezer.load_state_dict(state["freezer"])
    for name, parameter in freezer.chain.named_parameters(*segment):
        if name in state["optimizer"]:
            kept = state["optimizer"][name]
            freezer.optimizer.state[parameter] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in kept.items()}
    freezer.reducer.load_state_dict(state["reducer"])
    freezer.reducer.payload_bytes, freezer.reducer.other_bytes = state["bytes"]
    freezer.seal()


def redealt(
    owns: Iterable[Named], chain: Chain, segments: Iterable[Segment], *, restep: Callable[[int], int]
) -> Iterator[dict[str, Any]]:
    """Yield for each of `segments` the state with which a grid of another shape goes on.

    Running statistics are those of all replicas' batches together. Every rank is taken for the one that has handed over
    most gradients; what all have sent to neighbours is the first rank's.
    """
    tensors: dict[str, list[Tensor]] = {}
    optimizer: dict[str, Any] = {}
    exponents: dict[str, int] = {}
    handed_over = [0, 0]
    first: Named = {}
    sent: Counter[str] = Counter()
    for own in owns:
        first = first or own
        sent.update(own["sent"])
        for name, tensor in own["tensors"].items():
            # Parameters are equal on all replicas, BatchNorm's statistics are each one's own.
            if name not in tensors or name.endswith(("running_mean", "running_var")):
                tensors.setdefault(name, []).append(tensor)
        optimizer |= own["optimizer"]
        exponents |= own["reducer"]["exponents"]
        handed_over = [max(pair) for pair in zip(handed_over, own["bytes"], strict=True)]
    values = pooled(tensors)
    freezer = Freezer.redealt(first["freezer"], restep=restep)
    for rank, segment in enumerate(segments):
        mine = [name for name, _ in tensors_of(chain, segment)]
        yield {
            "tensors": {name: values[name] for name in mine},
            "optimizer": {name: optimizer[name] for name in mine if name in optimizer},
            "freezer": freezer,
            "reducer": {**first["reducer"], "exponents": {n: exponents[n] for n in mine if n in exponents}},
            "bytes": handed_over,
            "sent": dict(sent) if rank == 0 else dict.fromkeys(sent, 0),
        }


def pooled(tensors: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Return one tensor for each name: means of means, and for variances the law of total variance.

    Equal statistics are left as they are, bit for bit.
    """
    result = {name: copies[0] for name, copies in tensors.items()}
    for name, copies in tensors.items():
        if name.endswith("running_mean") and len(copies) > 1:
            other = name.removesuffix("mean") + "var"
            means, variances = torch.stack(copies).double(), torch.stack(tensors[other]).double()
            mean = means.mean(0)
            result[name] = mean.to(copies[0].dtype)
            result[other] = (variances.mean(0) + ((means - mean) ** 2).mean(0)).to(copies[0].dtype)
    return result
