"""The loss, the optimizers, and one update of the parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.tasks import Classes, Task
from hvfreeze.training.settings import OptimizerConfig

TRUST = 0.001
"""The part of its norm by which a tensor moves in a step, at learning rate 1 and without momentum."""


class LARS(torch.optim.Optimizer):
    """Updates v <- momentum v + lr ratio (g + decay w), w <- w - v, with ratio = trust |w| / (|g| + decay |w|).

    Where a tensor or its gradient is zero, the ratio is `trust` alone, so that biases that start at zero do move.

    Args:
        params: tensors, or groups of them, as for every torch optimizer.
        lr: learning rate; it is part of what the momentum remembers, as in the paper.
        momentum: of the update.
        weight_decay: weight decay.
        trust: the paper's eta.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = TRUST,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make an update of every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        decay, gradient = group["weight_decay"], parameter.grad
        assert gradient is not None
        # In float64, so that the order of a sum hardly ever shows in a ratio that is used in float32.
        size = torch.linalg.vector_norm(parameter, dtype=torch.float64).item()
        slope = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
        ratio = group["trust"] * (size / (slope + decay * size) if size and slope else 1.0)
        state = self.state[parameter]
        if not state:
            state["velocity"] = torch.zeros_like(parameter)
        velocity = state["velocity"].mul_(group["momentum"]).add_(gradient, alpha=group["lr"] * ratio)
        if decay:
            velocity.add_(parameter, alpha=group["lr"] * ratio * decay)
        parameter.sub_(velocity)


MIXUP = 0x6D69787570
"""Keeps these draws apart from those of other uses of the same seed: "mixup" in ASCII."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """What the trained blocks see of a batch, and what is right."""

    features: Tensor
    """(B, ...)."""
    labels: Tensor
    """As the task has them; of the sample whose part is the larger."""
    others: Tensor | None = None
    """Of the sample that was mixed in."""
    part: float = 1.0
    """Of the first sample, in [0.5, 1]."""


@dataclass(frozen=True)
class Objective:
    """Mixes a batch and gives its loss.

    Mixup (Zhang et al., ICLR 2018, arXiv 1710.09412) mixes images; behind a cut it mixes the frozen prefix's output, as
    manifold mixup does (Verma et al., ICML 2019, arXiv 1806.05236), so that what is cached stays a function of a sample
    and a view.

    Args:
        task: what the model answers.
        smoothing: part of each label that is spread evenly over all classes.
        mixup: alpha of the Beta distribution; 0 mixes nothing.
        seed: of the pairs and parts.
        replica: other replicas draw others.
    """

    task: Task = field(default_factory=lambda: Classes(0))
    smoothing: float = 0.0
    mixup: float = 0.0
    seed: int = 0
    replica: int = 0

    def mix(self, features: Tensor, labels: Tensor, *, step: int, number: int = 1) -> Mixture:
        """Return batch `number` of a step as it is trained on; no generator's history counts.

        One draw serves the whole batch. The larger part stays with the sample itself: pairs are drawn at random, so
        that it makes no difference, and the accuracy in training keeps its meaning.
        """
        if not self.mixup:
            return Mixture(features, labels)
        generator = np.random.default_rng([MIXUP, self.seed % 2**64, self.replica, step, number])
        drawn = float(generator.beta(self.mixup, self.mixup))
        partners = torch.from_numpy(generator.permutation(len(labels)))
        part = max(drawn, 1 - drawn)
        return Mixture(features.lerp(features[partners], 1 - part), labels, labels[partners], part)

    def loss(self, logits: Tensor, mixture: Mixture, weights: Tensor | None = None) -> Tensor:
        """Return a batch's mean loss; with (classes,) `weights` the mean of cross-entropies that have these weights."""
        if weights is not None:
            return functional.cross_entropy(logits, mixture.labels, weight=weights, label_smoothing=self.smoothing)
        loss = self.task.training_loss(logits, mixture.labels, smoothing=self.smoothing)
        if mixture.others is None:
            return loss
        other = self.task.training_loss(logits, mixture.others, smoothing=self.smoothing)
        return mixture.part * loss + (1 - mixture.part) * other

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row, (B,), of which `loss` is the mean where nothing is mixed."""
        return self.task.training_losses(logits, labels, smoothing=self.smoothing) * self.task.weights_of(labels)


OWN_RATE = "own_lr"
"""The key of a parameter group under which its learning rate stands while --schedule is at --lr."""
BETA_2 = 0.999


class Update:
    """Clips gradients and makes the optimizer's step.

    Votes on local gradients do not notice: they see each rank's own, before they are averaged.

    Args:
        optimizer: from `open_optimizer`; parameters may leave its groups.
        settings: what it was opened with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: OptimizerConfig) -> None:
        self.optimizer = optimizer
        self._base_rate, self._most = settings.lr, settings.clip_grad

    def gradients_are_finite(self) -> bool:
        """Tell whether no gradient holds NaN or infinity."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return all(bool(parameter.grad.isfinite().all()) for parameter in parameters if parameter.grad is not None)

    def make(self, rate: float) -> None:
        """Make the update; `rate` is what --lr has become by --schedule, which every group's own follows."""
        if self._most is not None:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self._most)
        for group in self.optimizer.param_groups:
            own = group[OWN_RATE]
            # Exactly its own rate while the schedule is at --lr, and exactly `rate` where the two are equal.
            group["lr"] = own if rate == self._base_rate else rate * (own / self._base_rate)
        lay_alike(self.optimizer)
        self.optimizer.step()


def lay_alike(optimizer: torch.optim.Optimizer) -> None:
    """Give gradients and the state of a fused optimizer the memory order of their parameters.

    Fused updates go through the memory of all of them side by side, whatever their strides say.
    """
    for group in optimizer.param_groups if optimizer.defaults.get("fused") else ():
        for parameter in group["params"]:
            strides, state = parameter.stride(), optimizer.state.get(parameter, {})
            if parameter.grad is not None and parameter.grad.stride() != strides:
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != strides:
                    state[key] = torch.empty_like(parameter).copy_(value)


def open_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    settings: OptimizerConfig,
    *,
    lr: float | None = None,
    head: Collection[str] = (),
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizer that the settings name.

    Args:
        named: all parameters, by name.
        settings: the optimizer, its momentum and its weight decay.
        lr: the learning rate at which the schedule begins; None is --lr.
        head: names of the parameters that have --head-lr, one number, where it is given.
        fused: whether AdamW's update is one operation: a third of the time, other last bits.
    """
    base = settings.lr if lr is None else lr
    head_lr = (settings.head_rates() or [base])[0]
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in named:
        rate = head_lr if name in head else base
        spared = settings.no_decay_norms and parameter.dim() <= 1
        groups.setdefault((rate, 0.0 if spared else settings.weight_decay), []).append(parameter)
    parts = [
        {"params": parameters, "lr": rate, OWN_RATE: rate, "weight_decay": decay}
        for (rate, decay), parameters in groups.items()
    ]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parts, lr=base, betas=(settings.momentum, BETA_2), fused=fused or None)
    if settings.optimizer == "lars":
        return LARS(parts, lr=base, momentum=settings.momentum)
    return torch.optim.SGD(parts, lr=base, momentum=settings.momentum, nesterov=settings.nesterov)


def needs_equal_arithmetic(settings: OptimizerConfig) -> bool:
    """Tell whether updates depend on norms, whose last bits depend on the processor and its threads."""
    return settings.optimizer == "lars" or settings.clip_grad is not None


def arithmetic_of(shapes: Iterable[tuple[int, ...]]) -> str:
    """Return a digest of the norms of fixed numbers in these shapes; ranks that give another compute other norms."""
    digest, generator = hashlib.sha256(), torch.Generator().manual_seed(0)
    for shape in shapes:
        numbers = torch.rand(shape, generator=generator) - 0.5
        norms = [torch.linalg.vector_norm(numbers), torch.linalg.vector_norm(numbers, dtype=torch.float64)]
        digest.update(str([norm.item() for norm in norms]).encode())
    return digest.hexdigest()
