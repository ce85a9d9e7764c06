"""How long a run will take: from the speed of one core of a common server processor, roughly.

Only sums and ratios of these numbers are used: a sweep corrects them by the runs that it has finished.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from analysis.sweeps.presets import PlannedRun, Preset
from hvfreeze.config.tree import Config

FORWARD_SECONDS, BACKWARD_SECONDS = 0.06 / 128, 0.15 / 128
"""Per sample at 32 pixels: ResNet-18, float32, one thread; backward with the optimizer's step."""
GROWTH = 1.74
"""Seconds grow with the image's side to this power."""
START_SECONDS = 6.0
MODEL_BYTES = 44.7e6
SMALL_MODEL = 0.04
"""The smoke preset's model beside ResNet-18."""
BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def bits_per_second(bandwidth: str) -> float:
    """Return tc's notation of a rate as a number, infinity for none."""
    match = re.fullmatch(r"([0-9.]+)([kmg]?)bit", bandwidth)
    return float(match[1]) * BITS[match[2]] if match else float("inf")


def seconds_of(planned: PlannedRun, preset: Preset) -> float:
    """Return the estimated wall-clock seconds of a run on this machine."""
    config = planned.config()
    data, settings = config.data, config.optimizer
    scale = ((data.image_size or 32) / 32) ** GROWTH * (SMALL_MODEL if preset.is_smoke else 1.0)
    crowd = max(1.0, planned.ranks / (os.cpu_count() or 1)) if preset.name != "full" else 1.0
    samples = data.train_samples or 50_000
    trained = samples * (1 - data.validation_fraction)
    evaluated = samples * data.validation_fraction or preset.test_samples
    steps = trained // (planned.ranks * settings.batch_size)
    compute = steps * settings.batch_size * (FORWARD_SECONDS + trainable(config) * BACKWARD_SECONDS)
    if config.head.solved and settings.epochs == 1:
        # Two views, and what solving takes beside them.
        compute = steps * settings.batch_size * 2.3 * FORWARD_SECONDS
    evaluations = -(-settings.epochs // config.run.evaluate_every)
    evaluation = evaluations / settings.epochs * evaluated / planned.ranks * FORWARD_SECONDS
    sent = 2 * (planned.ranks - 1) / planned.ranks * MODEL_BYTES * 8 * (0.04 if preset.is_smoke else 1.0)
    link = steps * sent / bits_per_second(planned.bandwidth)
    seconds: float = START_SECONDS * crowd + settings.epochs * ((compute + evaluation) * scale * crowd + link)
    return seconds


def trainable(config: Config) -> float:
    """Return the part of the backward pass that a statically frozen run makes, 1 for others."""
    cut = config.freeze.cut
    blocks = {"paper": 6, "stage": 5, "residual": 9}.get(config.resolved().model.blocks, 6)
    return 1.0 if cut is None else max(0.0, 1 - cut / blocks)


def total_seconds(runs: Sequence[PlannedRun], preset: Preset) -> float:
    """Return the estimated seconds of runs one after another."""
    return sum(seconds_of(planned, preset) for planned in runs)


def duration(seconds: float) -> str:
    """Return seconds for a person."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass
class Progress:
    """How far a sweep is, and how much longer it takes: the estimates, corrected by what finished runs took."""

    estimates: dict[str, float]
    done: dict[str, float] = field(default_factory=dict)
    """Seconds that each run took, 0 for those that were there already."""

    def left(self) -> float:
        """Return the estimated seconds of the runs to come."""
        measured = {name: taken for name, taken in self.done.items() if taken > 0}
        guessed = sum(self.estimates[name] for name in measured)
        correction = sum(measured.values()) / guessed if guessed else 1.0
        return correction * sum(seconds for name, seconds in self.estimates.items() if name not in self.done)

    def line(self, planned: PlannedRun) -> str:
        """Return where in the sweep a run stands."""
        left = duration(self.left())
        return f"[{len(self.done) + 1}/{len(self.estimates)}] {planned.name}, about {left} left"
