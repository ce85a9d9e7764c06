"""One update of the parameters: the optimizer by name, whose rate follows the schedule, and clipping before it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.updates.lars import LARS

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

    def make(self, rate: float) -> None:
        """Make the update; `rate` is what --lr has become by --schedule, which every group's own follows."""
        if self._most is not None:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self._most)
        for group in self.optimizer.param_groups:
            own = group[OWN_RATE]
            # Exactly its own rate while the schedule is at --lr, and exactly `rate` where the two are equal.
            group["lr"] = own if rate == self._base_rate else rate * (own / self._base_rate)
        self.optimizer.step()


def open_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    settings: OptimizerConfig,
    *,
    lr: float | None = None,
    head: Collection[str] = (),
    head_lr: float | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer that the settings name.

    Args:
        named: all parameters, by name.
        settings: the optimizer, its momentum and its weight decay.
        lr: the learning rate at which the schedule begins; None is --lr.
        head: names of the head's parameters.
        head_lr: their learning rate; None is `lr`.
    """
    base = settings.lr if lr is None else lr
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in named:
        rate = head_lr if head_lr is not None and name in head else base
        spared = settings.no_decay_norms and parameter.dim() <= 1
        groups.setdefault((rate, 0.0 if spared else settings.weight_decay), []).append(parameter)
    parts = [
        {"params": parameters, "lr": rate, OWN_RATE: rate, "weight_decay": decay}
        for (rate, decay), parameters in groups.items()
    ]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parts, lr=base, betas=(settings.momentum, BETA_2))
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
