"""A network of few parameters, as a user's own model."""

from torch import nn


def small(num_classes: int) -> nn.Module:
    """Return a classifier of 32-pixel images in four blocks."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.1)),
        nn.Linear(128, num_classes),
    )
