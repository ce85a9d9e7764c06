"""Which features a linear head makes use of when using one at all costs something (group lasso), and what came of it.

Evci et al., "Head2Toe: Utilizing Intermediate Representations for Better Transfer Learning" (ICML 2022), choose the
features that a head on all of them reads by this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from analysis.sweeps.kept import commit
from analysis.sweeps.statistics import Interval, Values, of_seeds, paired_difference, shown, signed_points, verdict
from hvfreeze.report.tables import percent
from hvfreeze.runs.environment import facts_of_this_rank

Rows = Sequence[dict[str, str]]
WORDS = {"compared": "compares rows (`kernel`)", "linear": "linear (`exact`)"}
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


def values(rows: Rows, features: str, head: str) -> Values:
    """Return accuracies by seed."""
    wanted = {"features": features, "head": head}
    return {int(row["seed"]): float(row["accuracy"]) for row in rows if wanted.items() <= row.items()}


def gain(rows: Rows, features: str, head: str, *, over: str) -> Interval:
    """Return the change of accuracy against other features, paired by seed."""
    return paired_difference(values(rows, features, head), values(rows, over, head))


def table(rows: Rows) -> str:
    """Return every choice of features with both heads, against all features of the frozen network."""
    lines = ["| features | their number | head | test accuracy | against all | shown |", "|---|---:|---|---:|---:|---|"]
    for name in dict.fromkeys(row["features"] for row in rows):
        for head in WORDS:
            width = next(row["width"] for row in rows if row["features"] == name)
            accuracy = shown(of_seeds(values(rows, name, head)), percent, count=True)
            change = gain(rows, name, head, over="all")
            told = ("", "") if name == "all" else (shown(change, signed_points), verdict(change))
            lines.append(f"| {name} | {width} | {WORDS[head]} | {accuracy} | {' | '.join(told)} |")
    return "\n".join(lines)


def answers(rows: Rows) -> str:
    """Return both questions answered, for the head that `--freeze auto` takes."""
    lines = []
    for head, words in WORDS.items():
        fewer = [name for name in dict.fromkeys(row["features"] for row in rows) if "lasso" in name]
        told = ", ".join(f"{name} {shown(gain(rows, name, head, over='all'), signed_points)}" for name in fewer)
        both = shown(gain(rows, "tuned and frozen", head, over="tuned"), signed_points)
        lines.append(f"- A head that {words}" if head == "compared" else f"- A head that is {words}")
        lines[-1] += f": against all features {told}; features of before tuning beside those of after {both}."
    return "\n".join(lines)


def readme(rows: Rows) -> str:
    """Return README.md."""
    known = facts_of_this_rank()
    return (
        "# Fewer features, and features of before and after tuning\n\n"
        f"{answers(rows)}\n\n{table(rows)}\n\n"
        "## Limits\n\n"
        "- CIFAR-10 at 32 pixels, 5 000 samples and their mirror images, one network that was trained on CIFAR-100.\n"
        "- The group lasso has one strength; its features are ranked by the norm of their weights.\n"
        "- Heads on tuned features take the penalty chosen for frozen ones: their held-out samples were learnt from.\n"
        "- Accuracies only; fewer features save no pass through the network, and a solution's time is small.\n\n"
        "## How it was made\n\n"
        "- `python -m analysis.chosen_features --data-dir DIR --weights resnet18-cifar100-32px-fp16.pt`\n"
        f"- {known['processor']}, {known['cores']} cores; torch {known['versions']['torch']}; source {commit()}\n"
        "- numbers: [rows.csv](rows.csv)\n"
    )
