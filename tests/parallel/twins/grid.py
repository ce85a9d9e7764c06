"""Model, data and hybrid parallelism as one process does it: what a grid of ranks must equal.

HyPar-Flow's rule (Awan et al., ISC 2020, arXiv 1911.05146), written with PyTorch and nothing of the strategy. A model
is cut into partitions. Each replica takes its own batch and splits it into micro-batches. A micro-batch goes forward
from partition to partition; the loss, weighted by its share of the batch, goes back the same way: a partition is given
the error of its output, and hands on the error of its input. Gradients add up over micro-batches and are averaged over
replicas, partition by partition. BatchNorm normalises each micro-batch alone, and each replica keeps its own
running statistics, which are pooled when the model is looked at. Frozen modules are in evaluation mode and take no
part in updates. Where a replica becomes several (PipeTransformer's idea, He et al., ICML 2021, arXiv 2102.03161), they
share its batch, micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from tests.parallel.twins import Batch

Ranges = Callable[[nn.Module], Sequence[Callable[[Tensor], Tensor]]]
"""A model -> its partitions, in forward order."""


class Grid:
    """R replicas of one model in one process.

    Args:
        model: at its start; every replica begins as a copy.
        replicas: how many.
        ranges: how a model is cut.
        micro_batches: how many parts a batch has; the first ones are larger by a sample where it does not divide.
        options: of the optimizer, SGD.
    """

    def __init__(
        self, model: nn.Module, *, replicas: int, ranges: Ranges, micro_batches: int, **options: float
    ) -> None:
        self.models = [deepcopy(model) for _ in range(replicas)]
        self.partitions = [ranges(each) for each in self.models]
        self.micro_batches, self._frozen = micro_batches, 0
        self.optimizers = [torch.optim.SGD(each.parameters(), **options) for each in self.models]  # type: ignore[arg-type]

    def step(self, batches: Sequence[Batch]) -> list[float]:
        """Make a step, a batch a replica; return the replicas' losses."""
        losses = []
        for model, partitions, (images, labels) in zip(self.models, self.partitions, batches, strict=True):
            model.train().zero_grad()
            for module in list(model.children())[: self._frozen]:
                module.eval()
            parts = zip(images.tensor_split(self.micro_batches), labels.tensor_split(self.micro_batches))
            losses.append(sum(one_way_and_back(partitions, x, y, len(y) / len(labels)) for x, y in parts))
        for together in zip(*[model.parameters() for model in self.models], strict=True):
            if together[0].grad is None:
                continue
            gradients = [parameter.grad / len(together) for parameter in together]  # type: ignore[operator]
            for parameter in together:
                parameter.grad = sum(gradients[1:], gradients[0])
        for optimizer in self.optimizers:
            optimizer.step()
        return losses

    def freeze(self, children: int) -> None:
        """Let the first so many children of the model train no more."""
        self._frozen = children
        for parameter in [p for each in self.models for m in list(each.children())[:children] for p in m.parameters()]:
            parameter.requires_grad_(False)
            parameter.grad = None

    def become(self, several: int, *, ranges: Ranges) -> None:
        """Make each replica so many, which are cut by `ranges` and have equal shares of its micro-batches."""
        before = [(model, optimizer) for model, optimizer in zip(self.models, self.optimizers) for _ in range(several)]
        self.models = [deepcopy(model) for model, _ in before]
        self.partitions = [ranges(each) for each in self.models]
        self.micro_batches //= several
        self.optimizers = []
        for model, (_, optimizer) in zip(self.models, before):
            options = {
                key: value for key, value in optimizer.defaults.items() if key in ("lr", "momentum", "weight_decay")
            }
            self.optimizers.append(torch.optim.SGD(model.parameters(), **options))
            self.optimizers[-1].load_state_dict(deepcopy(optimizer.state_dict()))


def one_way_and_back(
    partitions: Sequence[Callable[[Tensor], Tensor]], images: Tensor, labels: Tensor, share: float
) -> float:
    """Add up the gradients of a micro-batch; return its part of the loss."""
    inputs, outputs = [images], []
    for partition in partitions:
        outputs.append(partition(inputs[-1]))
        inputs.append(outputs[-1].detach().requires_grad_())
    loss = nn.functional.cross_entropy(outputs.pop(), labels) * share
    loss.backward()  # type: ignore[no-untyped-call]
    for output, received in zip(reversed(outputs), reversed(inputs[1:-1]), strict=True):
        if output.requires_grad:
            output.backward(received.grad)  # type: ignore[no-untyped-call]
    return loss.item()
