"""Deep and narrow residual networks for small images: 6n+2 layers of 16, 32 and 64 channels in 3n residual blocks.

A skip connection has no parameters: at a change of resolution it takes every other pixel and appends channels of zeros.
Source: He et al. 2016, "Deep Residual Learning", section 4.2, shortcuts of kind A.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.torchvision_shim import torchvision

WIDTHS = (16, 32, 64)
NARROW_RESNETS = {"resnet20": 3, "resnet110": 18}
"""Residual blocks per stage, n, by model name."""


class ZeroPadded(nn.Module):
    """A skip connection that takes every other pixel and appends channels of zeros."""

    def __init__(self, more_channels: int) -> None:
        super().__init__()
        self.more_channels = more_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, C + more channels, H / 2, W / 2) for (N, C, H, W)."""
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.more_channels))


class NarrowResNet(nn.Module):
    """A residual network of 6n+2 layers; modules have the names of torchvision's.

    Args:
        blocks: residual blocks in each of the three stages, n.
        num_classes: outputs.
    """

    def __init__(self, blocks: int, *, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(WIDTHS[0], WIDTHS[0], blocks)
        self.layer2 = _stage(WIDTHS[0], WIDTHS[1], blocks)
        self.layer3 = _stage(WIDTHS[1], WIDTHS[2], blocks)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(WIDTHS[2], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (N, classes), for images, (N, 3, H, W)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def narrow_resnet(name: str, *, num_classes: int) -> NarrowResNet:
    """Build the network `name`, one of `NARROW_RESNETS`, with random weights from torch's generator."""
    return NarrowResNet(NARROW_RESNETS[name], num_classes=num_classes)


def _stage(channels: int, width: int, blocks: int) -> nn.Sequential:
    block = torchvision.models.resnet.BasicBlock
    widens = width > channels
    first = block(channels, width, 2 if widens else 1, ZeroPadded(width - channels) if widens else None)
    return nn.Sequential(first, *[block(width, width) for _ in range(blocks - 1)])
