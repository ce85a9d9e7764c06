"""How right exits are, on what was evaluated: each, their mean, and the first that is sure of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvfreeze.model.early_exits import first_sure

CONFIDENCE = 0.9
"""Probability at which a sample leaves, for what a run reports."""


@dataclass
class ExitCounts:
    """Sums over samples, on the rank that has the logits of all exits.

    Args:
        work: floating-point operations of every exit, see `work_until`.
        whole: those of the model without critics.
    """

    work: Sequence[int]
    whole: int
    samples: int = 0
    correct: list[int] = field(default_factory=list)
    """By exit."""
    ensemble: int = 0
    """Samples that the mean of all exits' probabilities gets right."""
    left: list[int] = field(default_factory=list)
    """By exit, how many samples leave there."""
    early: int = 0
    """Samples that are right where they leave."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was counted."""
        self.samples = self.ensemble = self.early = 0
        self.correct, self.left = [0] * len(self.work), [0] * len(self.work)

    def add(self, logits: Sequence[Tensor], labels: Tensor) -> None:
        """Add the (B, classes) logits of every exit for samples of (B,) labels."""
        probabilities = torch.stack(list(logits)).softmax(2)
        leaves = first_sure(probabilities, CONFIDENCE)
        answers = probabilities.argmax(2)
        for number, each in enumerate(answers):
            self.correct[number] += int((each == labels).sum())
            self.left[number] += int((leaves == number).sum())
        self.ensemble += int((probabilities.mean(0).argmax(1) == labels).sum())
        self.early += int((answers.gather(0, leaves[None])[0] == labels).sum())
        self.samples += len(labels)

    def summary(self) -> dict[str, Any]:
        """Return accuracies and shares, 0-1; nothing where nothing was evaluated."""
        if not self.samples:
            return {}
        parts = [count / self.samples for count in self.left]
        return {
            "exit_accuracy": [count / self.samples for count in self.correct],
            "ensemble_accuracy": self.ensemble / self.samples,
            "exit_confidence": CONFIDENCE,
            "early_accuracy": self.early / self.samples,
            "samples_by_exit": parts,
            "flops_by_exit": [work / max(1, self.whole) for work in self.work],
            "early_flops": sum(part * work for part, work in zip(parts, self.work)) / max(1, self.whole),
        }
