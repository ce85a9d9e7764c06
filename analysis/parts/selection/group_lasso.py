"""Which features a linear head makes use of when using one at all costs something (group lasso).

Evci et al., "Head2Toe: Utilizing Intermediate Representations for Better Transfer Learning" (ICML 2022), choose the
features that a head on all of them reads by this.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

STEPS = 150
STRENGTH = 0.02
"""Of the penalty, as a part of the least that lets no feature be used."""


def used(features: Tensor, labels: Tensor, *, classes: int, strength: float = STRENGTH, steps: int = STEPS) -> Tensor:
    """Return how much of each feature is used, (D,): the norm of its weights, 0 where it is not; see `fitted`."""
    found: Tensor = fitted(features, labels, classes=classes, strength=strength, steps=steps).norm(dim=1)
    return found


def fitted(features: Tensor, labels: Tensor, *, classes: int, strength: float, steps: int) -> Tensor:
    """Return a linear head's weights, (D, C), with rows of zeros.

    Minimises mean cross-entropy + l x the sum over features of that norm, by accelerated proximal gradient steps.

    Args:
        features: (N, D), of mean 0 and deviation 1.
        labels: (N,) in 0..classes-1.
        classes: C.
        strength: in 0..1; see `STRENGTH`.
        steps: gradient steps.
    """
    truth = functional.one_hot(labels, classes).float()
    weights = torch.zeros(features.shape[1], classes)
    bias, ahead, momentum = truth.mean(0).log(), weights, 1.0
    limit = strength * float(gradient(features, truth, weights, bias).norm(dim=1).max())
    # The loss bends at most half as much as the features' second moments do.
    length = 2.0 / largest_moment(features)
    for _ in range(steps):
        stepped = ahead - length * gradient(features, truth, ahead, bias)
        norms = stepped.norm(dim=1, keepdim=True)
        shrunk = stepped * (1 - length * limit / norms.clamp(min=1e-30)).clamp(min=0)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = shrunk + (momentum - 1) / following * (shrunk - weights)
        weights, momentum = shrunk, following
    return weights


def gradient(features: Tensor, truth: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient of the mean cross-entropy, (D, C)."""
    wrong = torch.softmax(features @ weights + bias, 1) - truth
    return torch.mm(features.t(), wrong).div(len(features))


def largest_moment(features: Tensor, *, steps: int = 20) -> float:
    """Return the largest eigenvalue of features^T features / N, by power iteration."""
    vector = torch.ones(features.shape[1])
    for _ in range(steps):
        vector = features.t() @ (features @ vector) / len(features)
        length = float(vector.norm())
        vector /= length
    return length
