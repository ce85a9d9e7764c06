"""The training loss, the optimizers, and the update of the parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.tasks import Classes, Samples, Task

TRUST = 0.001
"""Relative change of a tensor's norm per step, at learning rate 1 and without momentum."""


class LARS(torch.optim.Optimizer):
    """The LARS optimizer: v <- momentum v + lr ratio (g + decay w), w <- w - v, ratio = trust |w| / (|g| + decay |w|).

    For a tensor or gradient of zeros, the ratio is `trust`, so that biases with initial value 0 change.

    Args:
        params: tensors or groups of them, as for every torch optimizer.
        lr: learning rate, which is part of the momentum buffer, as in the paper.
        momentum: momentum of the update.
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
        """Update every tensor with a gradient."""
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
        # In float64, so that the order of a sum hardly changes the float32 ratio.
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
"""Purpose that makes these random draws independent of others with the same seed: "mixup" in ASCII."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixed batch: the input of the trained blocks, and its labels."""

    features: Tensor
    """Input of the trained blocks, (B, ...)."""
    labels: Tensor
    """Labels of the samples with the larger part, in the task's form."""
    samples: Samples
    """Ids of these samples, (B,)."""
    partners: Tensor | None = None
    """Index of the sample that is mixed into each, (B,)."""
    part: float = 1.0
    """Part of the first sample, in [0.5, 1]."""


@dataclass(frozen=True)
class Objective:
    """The training objective: mixup and the loss of a batch.

    Mixup (Zhang et al., ICLR 2018, arXiv 1710.09412) mixes images. After a cut it mixes the output of the frozen
    prefix, like manifold mixup (Verma et al., ICML 2019, arXiv 1806.05236), so that cached rows depend on a sample and
    a view alone.

    Args:
        task: task of the model.
        smoothing: share of each label that is spread over all classes.
        mixup: alpha of the Beta distribution; 0 mixes nothing.
        seed: seed of the pairs and parts.
        replica: index of the replica, which changes the draws.
    """

    task: Task = field(default_factory=lambda: Classes(0))
    smoothing: float = 0.0
    mixup: float = 0.0
    seed: int = 0
    replica: int = 0

    def mix(self, features: Tensor, labels: Tensor, samples: Samples, *, step: int, number: int = 1) -> Mixture:
        """Return the mixed batch `number` of a step; it does not depend on the state of a generator.

        One draw applies to the whole batch. The sample itself has the larger part, so that the training accuracy keeps
        its meaning; this is equivalent because pairs are random.
        """
        if not self.mixup:
            return Mixture(features, labels, samples)
        generator = np.random.default_rng([MIXUP, self.seed % 2**64, self.replica, step, number])
        drawn = float(generator.beta(self.mixup, self.mixup))
        partners = torch.from_numpy(generator.permutation(len(labels)))
        part = max(drawn, 1 - drawn)
        return Mixture(features.lerp(features[partners], 1 - part), labels, samples, partners, part)

    def loss(self, logits: Tensor, mixture: Mixture) -> Tensor:
        """Return the weighted mean loss of a batch."""
        labels, samples, partners = mixture.labels, mixture.samples, mixture.partners
        loss = self.task.training_loss(logits, labels, samples, smoothing=self.smoothing)
        if partners is None:
            return loss
        others = torch.as_tensor(samples)[partners]
        other = self.task.training_loss(logits, labels[partners], others, smoothing=self.smoothing)
        return mixture.part * loss + (1 - mixture.part) * other

    def each(self, logits: Tensor, labels: Tensor, samples: Samples) -> Tensor:
        """Return the loss of each row, (B,); without mixing, `loss` is its mean."""
        return self.task.weighted_losses(logits, labels, samples, smoothing=self.smoothing)


OWN_RATE = "own_lr"
"""Key of a parameter group for its learning rate at the start of --schedule."""


class Update:
    """An update: clip gradients and step the optimizer.

    Votes on local gradients are unaffected: they see each rank's own, before averaging.

    Args:
        optimizer: from `open_optimizer`; parameters may leave its groups.
        settings: its settings.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: OptimizerConfig) -> None:
        self.optimizer = optimizer
        self._base_rate, self._most = settings.lr, settings.clip_grad

    def gradients_are_finite(self) -> bool:
        """Return True if no gradient holds NaN or Inf."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return all(bool(parameter.grad.isfinite().all()) for parameter in parameters if parameter.grad is not None)

    def make(self, rate: float) -> None:
        """Make the update at `rate`, the current value of --lr by --schedule; the rates of groups scale with it."""
        if self._most is not None:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self._most)
        for group in self.optimizer.param_groups:
            own = group[OWN_RATE]
            # Exactly its own rate while the schedule is at --lr, and exactly `rate` if the two are equal.
            group["lr"] = own if rate == self._base_rate else rate * (own / self._base_rate)
        lay_alike(self.optimizer)
        self.optimizer.step()


def lay_alike(optimizer: torch.optim.Optimizer) -> None:
    """Give gradients and the state of a fused optimizer the memory format of their parameters.

    Fused updates ignore strides and traverse the memory of all of them in parallel.
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
    """Return the optimizer of the settings.

    Args:
        named: all parameters, by name.
        settings: the optimizer, its momentum and its weight decay.
        lr: initial learning rate; None is --lr.
        head: names of the parameters that use --head-lr, if it is a single number.
        fused: whether AdamW's update is one operation: 3x faster, with other last bits.
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
        return torch.optim.AdamW(parts, lr=base, betas=(settings.momentum, 0.999), fused=fused or None)
    if settings.optimizer == "lars":
        return LARS(parts, lr=base, momentum=settings.momentum)
    return torch.optim.SGD(parts, lr=base, momentum=settings.momentum, nesterov=settings.nesterov)


def needs_equal_arithmetic(settings: OptimizerConfig) -> bool:
    """Return True if updates depend on norms, whose last bits depend on the processor and its threads."""
    return settings.optimizer == "lars" or settings.clip_grad is not None


def arithmetic_of(shapes: Iterable[tuple[int, ...]]) -> str:
    """Return a digest of the norms of fixed numbers in these shapes; ranks with other digests compute other norms."""
    digest, generator = hashlib.sha256(), torch.Generator().manual_seed(0)
    for shape in shapes:
        numbers = torch.rand(shape, generator=generator) - 0.5
        norms = [torch.linalg.vector_norm(numbers), torch.linalg.vector_norm(numbers, dtype=torch.float64)]
        digest.update(str([norm.item() for norm in norms]).encode())
    return digest.hexdigest()
