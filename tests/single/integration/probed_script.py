"""A training script whose frozen blocks are looked at: its model, its loop, and what was reached."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.comm.world import SoloWorld, World
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.freezing.coherence import Coherence
from hvfreeze.integration.optimizer import DistributedOptimizer

Make = Callable[[Any], torch.optim.Optimizer]
INTERVAL = 5
SETTINGS = FreezeConfig(freeze="coherence", interval=INTERVAL, freeze_warmup=INTERVAL)


class Mixed(nn.Module):
    """A convolution that a script may freeze before it has learned, BatchNorm, dropout, and a part that some skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.1))
        self.middle, self.extra = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 3))

    def forward(self, x: Tensor, *, more: bool = False) -> Tensor:
        x = self.middle(self.stem(x))
        logits: Tensor = self.head(self.extra(x) + x if more else x)
        return logits


class Script:
    """Trains on small patterns in noise, which a random first layer hardly sees; gradients are clipped.

    Attributes:
        reached: the steps in which the frozen stem had a gradient.
        sent: the bytes of gradients in each step.
    """

    def __init__(
        self, make: Make, *, world: World | None = None, passes: int = 1, compression: Any = "none", **settings: Any
    ) -> None:
        self.world = SoloWorld() if world is None else world
        self.model, self.passes = Mixed(), passes
        self.inner = make(self.model.parameters())
        chosen = replace(SETTINGS, **settings)
        length = {} if chosen.freeze in ("coherence", "gradient-norm") else {"steps_per_epoch": 10, "num_epochs": 9}
        self.optimizer = DistributedOptimizer(
            self.inner,
            model=self.model,
            compression=compression,
            backward_passes_per_step=passes,
            blocks=["stem", "middle", "head"],
            settings=chosen,
            world=self.world,
            **length,
        )
        self.freezer = self.optimizer.freezer
        self.reached: list[int] = []
        self.sent: list[int] = []
        self.front = self.model.stem[0].weight

    @property
    def seen(self) -> Coherence:
        """What was sampled of gains."""
        found = self.freezer._coherence
        assert found is not None
        return found

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return this rank's images of a pass, and their classes."""
        generator = torch.Generator().manual_seed(1000 * number + self.world.rank)
        labels = torch.randint(0, 3, (16,), generator=generator)
        patterns = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(99))
        return patterns[labels] + 0.2 * torch.randn(16, 1, 8, 8, generator=generator), labels

    def train(
        self, steps: int, *, scale: float = 1.0, dtype: torch.dtype | None = None, steps_made: bool = True
    ) -> None:
        for _ in range(steps):
            step, before = self.freezer.step + 1, self.optimizer.reducer.payload_bytes
            torch.manual_seed(1000 * step + self.world.rank)  # dropout
            self.optimizer.zero_grad()
            frozen = self.freezer.cut > 0
            if frozen and self.front.requires_grad:
                self.reached.append(step)
            for number in range(self.passes):
                images, labels = self.batch(self.passes * step + number)
                # On one rank a skipped part has no gradient, which PyTorch's fused SGD does not take later.
                more = self.world.size > 1 and (step + self.world.rank + number) % 3 == 0
                with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                    loss = functional.cross_entropy(self.model(images, more=more), labels)
                (loss / self.passes * scale).backward()
            self.optimizer.synchronize()
            for parameter in self.model.parameters() if self.world.size > 1 else [self.front]:
                assert parameter.requires_grad == (parameter.grad is not None), "scripts expect a gradient where it is"
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            if steps_made:  # a scaler leaves one out whose gradients overflow
                with self.optimizer.skip_synchronize():
                    self.optimizer.step()
            self.sent.append(self.optimizer.reducer.payload_bytes - before)

    def state(self) -> tuple[Any, Any, Any]:
        """Return a copy of what a script saves."""
        return copy.deepcopy(
            (self.model.state_dict(), self.optimizer.state_dict(), self.optimizer.freezer_state_dict())
        )

    def load(self, saved: tuple[Any, Any, Any]) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.optimizer.load_freezer_state_dict(saved[2])


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
