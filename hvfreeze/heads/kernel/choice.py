"""The penalty, and what makes of a row's sums logits: both are chosen on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.heads.kernel.conjugate import MOST_STEPS, solve
from hvfreeze.heads.kernel.gram import Gram
from hvfreeze.heads.nystrom import covariance
from hvfreeze.heads.solution import Trial

LEAST_GAIN = 0.03
"""Of two penalties the weaker is chosen, unless the stronger lowers the held-out loss by more than this part."""
TOLERANCE = 0.1
"""While it is chosen, what may be missing of the right sides: such vectors have the held-out loss, nearly."""
MOST_COLUMNS = 640
"""Right sides at a time: beyond, all vectors together would take more memory than the matrix."""
SCALES = tuple(10 ** (part / 20) for part in range(-20, 41))
"""From 0.1 to 100, among which the factor of the sums is chosen."""


@dataclass(frozen=True)
class Choice:
    """A penalty, the factor that goes with it, and all that were tried."""

    penalty: float
    scale: float
    trials: tuple[Trial, ...]

    def judged(self, scale: float, trial: Trial) -> Choice:
        """Return the choice with what a better trial of its penalty says."""
        return Choice(self.penalty, scale, tuple(trial if t.penalty == self.penalty else t for t in self.trials))


def choose(
    gram: Gram, labels: Tensor, held_out: Tensor, *, classes: int, penalties: Sequence[float], whole: bool
) -> Choice:
    """Return the penalty that held-out rows choose; the others are fitted with all penalties at once.

    Rank 0 calls this while every other rank is in `Gram.follow`.

    Args:
        gram: of all rows.
        labels: (N,), of all rows.
        held_out: (N,) bool.
        classes: C.
        penalties: above 0.
        whole: whether these are all rows.

    Raises:
        Stopped: some rank wants to stop.
    """
    leading, right = covariance(gram.sketch().double()), targets(labels, classes)
    truth, trials, scales = labels[held_out], [], []
    together = max(1, MOST_COLUMNS // classes)
    for first in range(0, len(penalties), together):
        some = penalties[first : first + together]
        solved = solve(
            gram.times,
            right.repeat(1, len(some)),
            torch.tensor(some, dtype=torch.float64).repeat_interleave(classes),
            fitted=~held_out,
            leading=leading,
            tolerance=TOLERANCE,
            most_steps=MOST_STEPS,
        )
        said = gram.times(solved.vectors)[held_out].double()
        for penalty, answers in zip(some, said.split(classes, 1), strict=True):
            scale, trial = tried(penalty, answers, truth, steps=solved.steps, whole=whole)
            trials.append(trial)
            scales.append(scale)
    # Rows that are left out here are fitted in the end, and with more rows a weaker penalty is the better one.
    bound = (1 + LEAST_GAIN) * min(trial.held_out_loss for trial in trials)
    good = [place for place, trial in enumerate(trials) if trial.held_out_loss <= bound]
    best = min(good, key=lambda place: trials[place].penalty)
    return Choice(trials[best].penalty, scales[best], tuple(trials))


def tried(penalty: float, answers: Tensor, truth: Tensor, *, steps: int, whole: bool) -> tuple[float, Trial]:
    """Return what held-out rows say of a penalty, by their answers, (B, C), and labels; the factor that suits them."""
    scale, loss = best_scale(answers, truth)
    return scale, Trial(penalty, loss, float((answers.argmax(1) == truth).double().mean()), steps, whole)


def targets(labels: Tensor, classes: int) -> Tensor:
    """Return what is to be said of rows, (N, C) float64: 1 - 1 / C for the class, -1 / C for the others."""
    return functional.one_hot(labels, classes).double() - 1 / classes


def best_scale(answers: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return of `SCALES` the one by which `answers`, (B, C), have the least cross-entropy, and that."""
    losses = [float(functional.cross_entropy(scale * answers, labels)) for scale in SCALES]
    best = min(range(len(SCALES)), key=losses.__getitem__)
    return SCALES[best], losses[best]
