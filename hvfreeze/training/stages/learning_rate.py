"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math


def learning_rate(step: int, *, base: float, schedule: str, warmup: int, total: int) -> float:
    """Return the learning rate of the update that follows `step` updates.

    Args:
        step: updates made so far.
        base: the rate that `constant` keeps.
        schedule: `constant`; `step`, a tenth from 50 % and a hundredth from 75 % of training on; or `cosine`, to 0.
        warmup: updates over which the rate rises linearly.
        total: updates of the whole run.
    """
    if step < warmup:
        return base * (step + 1) / warmup
    if schedule == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    if schedule == "step":
        return base * (0.01 if step >= 0.75 * total else 0.1 if step >= 0.5 * total else 1.0)
    return base
