"""The study's own numbers (Singh, Sureka, Bedi: "Can Limiting the Number of Layers Updated Help Accelerate
Data-Parallel Fine-Tuning?", 2020), each with the figure or table that it comes from. Accuracies 0-1.

Setting: 4 nodes without GPU, PyTorch DDP over gloo, ResNet-18, CIFAR-10, 50 epochs. Static and adaptive runs seem to
use two different ResNet-18s, so their accuracies are not comparable with each other.
"""

from __future__ import annotations

from dataclasses import dataclass

EPOCHS = 50
RANKS = 4

STATIC_SOURCE = "Figures 3 to 5, read off"
SECONDS_PER_EPOCH = (824.9, 821.8, 789.0, 615.5, 497.9, 363.4, 151.6)
"""Seconds per epoch by number of frozen groups 0..6 (Figure 3)."""
SPEED_UP = (1.00, 1.00, 1.05, 1.34, 1.66, 2.27, 5.44)
"""Speed-up by number of frozen groups (Figure 3)."""
STATIC_ACCURACY = (0.8008, 0.8248, 0.8092, 0.7700, 0.7174, 0.5946, 0.1535)
"""Test accuracy by number of frozen groups, after 50 epochs (Figures 4 and 5)."""


@dataclass(frozen=True)
class Outcome:
    """A column of Table 1: seconds per epoch, seconds in all, test accuracy."""

    forward: float
    backward: float
    optimizer: float
    total: float
    accuracy: float


TABLE_1_SOURCE = "Table 1"
ADAPTIVE = Outcome(15.75, 197.49, 3.69, 180.77 * 60, 0.7081)
FULL = Outcome(15.96, 242.04, 3.99, 218.33 * 60, 0.7662)
ADAPTIVE_SPEED_UP = 1.208

CACHED_SPEED_UP = {3: 1.43, 4: 1.96, 5: 3.32}
"""Speed-up by number of frozen groups with a perfect cache, computed from the paper's timings."""
