"""A small classification problem with features of very different size, for heads to be solved on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.tasks import Classes

CLASSES = 4
CENTRES = 250
PENALTY = 0.004
CONSTANT, LARGE = 5, 6
"""Columns: one without any information, one with a mean of 500 and a deviation of 0.5."""


def labelled_table(rows: int = 1203) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (N, 12) float32 features, (N,) labels and (N,) bool, whether a row is held out."""
    random = torch.Generator().manual_seed(3)
    labels = torch.randint(0, CLASSES, (rows,), generator=random)
    centres = torch.randn(CLASSES, 12, generator=random)
    features = centres[labels] + 1.5 * torch.randn(rows, 12, generator=random)
    features[:, 2] = 0.9 * features[:, 1] + 0.1 * features[:, 2]
    features[:, 3] *= 1e-3
    features[:, CONSTANT] = 0.3
    features[:, LARGE] = 500 + 0.3 * features[:, LARGE]
    return features, labels, torch.rand(rows, generator=random) < 0.15


def best_scale(answers: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the scale of `answers` that a million samples would choose, and the cross-entropy."""
    calibration = Classes(answers.shape[1]).calibrate(answers, labels, torch.ones(len(labels)), samples=10**6)
    return float(calibration.scale[0]), float(functional.cross_entropy(calibration.apply(answers), labels))
