"""What a rank's vote weighs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def coverage(labels: Sequence[int], num_classes: int) -> float:
    """Return the relative entropy of the labels (0-1) times their number: how much of the task a rank sees."""
    counts = torch.bincount(torch.as_tensor(labels, dtype=torch.int64), minlength=num_classes).double()
    shares = counts[counts > 0] / counts.sum()
    entropy = float(-(shares * shares.log()).sum())
    return entropy / math.log(num_classes) * len(labels) if num_classes > 1 else float(len(labels))


@dataclass(frozen=True, kw_only=True)
class Voter:
    """What a rank's voting weight may depend on besides its training: its shard."""

    samples: int = 1
    coverage: float = 1.0


def voting_weight(kind: str, *, rank: int, voter: Voter, mean_loss: float, signal_to_noise: float) -> float:
    """Return this rank's raw voting weight.

    `loss` is exp(mean local loss of the interval): normalised over ranks, a softmax at temperature 1, in which
    workers with harder data count more. A list gives one number per rank.
    """
    if kind == "uniform":
        return 1.0
    if kind == "samples":
        return float(voter.samples)
    if kind == "coverage":
        return voter.coverage
    if kind == "snr":
        return signal_to_noise
    if kind == "loss":
        return math.exp(min(mean_loss, 100.0)) if not math.isnan(mean_loss) else math.nan
    return float(kind.split(",")[rank])
