"""What training minimises: cross-entropy, with smoothed labels and with mixed pairs of samples where asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

MIXUP = 0x6D69787570
"""Keeps these draws apart from those of other uses of the same seed: "mixup" in ASCII."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """What the trained blocks see of a batch, and what is right."""

    features: Tensor
    """(B, ...)."""
    labels: Tensor
    """(B,) int64; of the sample whose part is the larger."""
    others: Tensor | None = None
    """(B,) int64, of the sample that was mixed in."""
    part: float = 1.0
    """Of the first sample, in [0.5, 1]."""


@dataclass(frozen=True)
class Objective:
    """Mixes a batch and gives its loss.

    Mixup (Zhang et al., ICLR 2018, arXiv 1710.09412) mixes images; behind a cut it mixes the frozen prefix's output, as
    manifold mixup does (Verma et al., ICML 2019, arXiv 1806.05236), so that what is cached stays a function of a sample
    and a view.

    Args:
        smoothing: part of each label that is spread evenly over all classes.
        mixup: alpha of the Beta distribution; 0 mixes nothing.
        seed: of the pairs and parts.
        replica: other replicas draw others.
    """

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
        generator = np.random.default_rng([MIXUP, self.seed, self.replica, step, number])
        drawn = float(generator.beta(self.mixup, self.mixup))
        partners = torch.from_numpy(generator.permutation(len(labels)))
        part = max(drawn, 1 - drawn)
        return Mixture(features.lerp(features[partners], 1 - part), labels, labels[partners], part)

    def loss(self, logits: Tensor, mixture: Mixture, weights: Tensor | None = None) -> Tensor:
        """Return a batch's mean loss for (B, classes) logits; with (classes,) weights the weighted mean."""
        loss = functional.cross_entropy(logits, mixture.labels, weight=weights, label_smoothing=self.smoothing)
        if mixture.others is None:
            return loss
        other = functional.cross_entropy(logits, mixture.others, weight=weights, label_smoothing=self.smoothing)
        return mixture.part * loss + (1 - mixture.part) * other
