"""Transfer learning as everybody does it: one model, alone in one process, front layers fixed, last ones trained.

The paper's baseline, written with PyTorch and nothing of the strategy: what several models on one trunk must equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CHILDREN = ("conv1", "bn1", "relu", "layer1", "layer2", "layer3", "avgpool", "fc")


@dataclass
class Alone:
    """A ResNet that is fine-tuned alone.

    Args:
        pretrained: the network whose front layers are taken, and stay fixed.
        fresh: a network of the same kind, whose last layers are taken, and trained.
        own: names of the last layers.
    """

    pretrained: nn.Module
    fresh: nn.Module
    own: Sequence[str]
    lr: float
    momentum: float
    weight_decay: float
    class_weights: Tensor | None = None

    def __post_init__(self) -> None:
        for name in CHILDREN:
            if name not in self.own:
                setattr(self.fresh, name, getattr(self.pretrained, name))
        self.model = self.fresh
        trained = [p for name in self.own for p in getattr(self.model, name).parameters()]
        for parameter in self.model.parameters():
            parameter.requires_grad_(any(parameter is one for one in trained))
        self.optimizer = torch.optim.SGD(trained, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def features(self, images: Tensor) -> Tensor:
        """What the fixed layers give; BatchNorm uses what it has learnt before, and learns no more."""
        with torch.no_grad():
            for name in CHILDREN:
                if name in self.own:
                    break
                if name != "avgpool" or "layer3" in self.own:
                    images = getattr(self.model, name).eval()(images)
        return images

    def logits(self, features: Tensor) -> Tensor:
        if "layer3" in self.own:
            features = self.model.layer3.train()(features)  # type: ignore[operator, union-attr]
        return self.model.fc(torch.flatten(self.model.avgpool(features), 1))  # type: ignore[operator]

    def train(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """Make a step a batch, (images, labels); return the losses."""
        losses = []
        for images, labels in batches:
            loss = nn.functional.cross_entropy(self.logits(self.features(images)), labels, weight=self.class_weights)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def seeded(build: Callable[[int], nn.Module], classes: int, seed: int) -> nn.Module:
    """A network that starts from `seed`."""
    torch.manual_seed(seed)
    return build(classes)
