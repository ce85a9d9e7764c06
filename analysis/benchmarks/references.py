"""Training loops as one would write them by hand for one model: what ours is measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.benchmarks.material import LEARNING_RATE, MOMENTUM, NUM_CLASSES, WEIGHT_DECAY, HeldBatch
from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.world import World
from hvfreeze.torchvision_shim import torchvision

Forward = Callable[[Tensor], Tensor]


class Optimizer(Protocol):
    """A torch optimizer, or Horovod's around one."""

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def step(self) -> Any:
        """Update the parameters."""


def resnet() -> Any:
    """Return torchvision's ResNet-18 with the weights that every job starts with, in the layout that they come in.

    With channels_last images all activations are channels_last too, and at 32 px this is faster than with
    channels_last weights (0.95 of the step's time).
    """
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=NUM_CLASSES)


def resnet_like(model: nn.Module) -> Any:
    """Return the same with the weights in the layout of `model`'s, so that kernels are the same too."""
    made = resnet()
    for mine, theirs in zip(made.parameters(), model.parameters(), strict=True):
        mine.data = torch.empty_like(theirs).copy_(mine)
    return made


def parts_of(model: Any) -> list[nn.Module]:
    """Return the modules of a ResNet in forward order, cut where blocks of scheme `stage` are."""
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    head = nn.Sequential(model.avgpool, nn.Flatten(1), model.fc)
    return [stem, model.layer1, model.layer2, model.layer3, model.layer4, head]


def split(model: Any, cut: int) -> tuple[nn.Module, nn.Module]:
    """Return prefix and suffix, the prefix frozen and in evaluation mode."""
    parts = parts_of(model)
    prefix, suffix = nn.Sequential(*parts[:cut]), nn.Sequential(*parts[cut:])
    prefix.requires_grad_(False)
    prefix.eval()
    suffix.train()
    return prefix, suffix


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that every job uses."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


class Count:
    """Loss and hits so far, as any training script keeps them."""

    def __init__(self) -> None:
        self.loss, self.correct, self.count = 0.0, 0, 0

    def add(self, logits: Tensor, labels: Tensor, loss: float) -> None:
        """Add a batch."""
        self.loss += loss * len(labels)
        self.correct += int((logits.argmax(1) == labels).sum())
        self.count += len(labels)


class PlainLoop:
    """forward, loss, zero_grad, backward, step; gradients are averaged by hooks or by the optimizer."""

    def __init__(self, forward: Forward, optimizers: Sequence[Optimizer], batches: Sequence[HeldBatch]) -> None:
        self.forward, self.optimizers = forward, optimizers
        self.batches: Iterator[HeldBatch] = cycle(batches)
        self.count = Count()

    def step(self) -> float:
        """Make one step; return the loss."""
        x, labels = next(self.batches)
        logits = self.forward(x)
        loss = functional.cross_entropy(logits, labels)
        value = loss.item()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.count.add(logits.detach(), labels, value)
        return value


class ReducedLoop:
    """A frozen prefix without gradient, and the suffix's step with hvfreeze's reducer and a plain optimizer."""

    def __init__(self, world: World, model: nn.Module, *, cut: int) -> None:
        """`model` is a job's, whose layout of weights is taken over."""
        self.prefix, self.suffix = split(resnet_like(model), cut)
        self.optimizer = sgd(self.suffix)
        self.reducer = Reducer(world)
        self.reducer.carry(list(self.suffix.named_parameters()))
        self.count = Count()

    def output_of_prefix(self, x: Tensor) -> Tensor:
        """Return the activations at the cut."""
        with torch.no_grad():
            result: Tensor = self.prefix(x)
        return result

    def suffix_step(self, activations: Tensor, labels: Tensor) -> float:
        """Make one step from activations; return the loss."""
        logits = self.suffix(activations)
        loss = functional.cross_entropy(logits, labels)
        value: float = loss.item()
        self.reducer.begin()
        loss.backward()
        self.reducer.finish()
        self.optimizer.step()
        self.count.add(logits.detach(), labels, value)
        return value

    def whole_step(self, x: Tensor, labels: Tensor) -> float:
        """Make one step from images; return the loss."""
        return self.suffix_step(self.output_of_prefix(x), labels)


def repeated(step: Callable[[Tensor, Tensor], float], batches: Sequence[HeldBatch]) -> Callable[[], float]:
    """Return `step` on the next of `batches`, over and over."""
    turns = cycle(batches)
    return lambda: step(*next(turns))
