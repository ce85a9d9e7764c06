"""A whole frozen and cached run against the least that its phases take: every prefix output once, then suffix steps."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import HeldBatch, Setting, replicas_of
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.references import ReducedLoop
from analysis.benchmarks.rows.cached import KEPT
from analysis.benchmarks.runs import ProgramRun, epoch_of

STEPS = {1: 5, 2: 6, 3: 8, 4: 12, 5: 60}
"""Steps of an epoch, by cut: runs of about equal length, long compared with the program's measurements at the start."""
EPOCHS = 4
MIN_PAIRS = 3
BOUND = 1 / 0.9


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    setting = Setting.of(ranks, scratch, pace, steps=4, epochs=EPOCHS)
    full_step = step_in_full(setting)
    for cut, steps in STEPS.items():
        name = f"whole_run_cut{cut}"
        if name in wanted:
            chosen = setting if pace.quick else replace(setting, steps=steps)
            yield from contest(ranks, name, cut, chosen, pace, full_seconds=EPOCHS * chosen.steps * full_step)


def contest(ranks: Ranks, name: str, cut: int, setting: Setting, pace: Pace, *, full_seconds: float) -> list[Row]:
    """Compare at one cut. Collective: every rank must call this."""
    ours, ideal = ProgramRun(setting, name, cut=cut, cache=KEPT), IdealRun(setting, cut)
    duel = Duel(
        name=name,
        ours="cached",
        reference="ideal",
        bound=BOUND,
        alike=False,
        what=f"ceiling of the speed-up over full fine-tuning over our speed-up, {EPOCHS} epochs of {setting.steps} "
        f"steps, cut {cut}: our whole run against its phases by hand, each done once",
        describe=lambda medians: (
            f"speed-up {full_seconds / medians['cached']:.2f} of at most {full_seconds / medians['ideal']:.2f}"
        ),
    )
    sides = [Side("cached", ours.step, prepare=ours.prepare), Side("ideal", ideal.step, prepare=ideal.prepare)]
    return hold(ranks, sides, [duel], pace=pace.at_least(MIN_PAIRS))


def step_in_full(setting: Setting) -> float:
    """Return the seconds of a step in which everything trains. Collective: every rank must call this."""
    job = setting.job("full")
    epoch_of(job)
    start = time.perf_counter()
    epoch_of(job)
    return (time.perf_counter() - start) / setting.steps


class IdealRun:
    """Each sample is loaded and sent through the prefix once; then every suffix step finds its input in memory."""

    def __init__(self, setting: Setting, cut: int) -> None:
        self.setting, self.cut = setting, cut

    def prepare(self) -> None:
        """Set up a new run. Collective: every rank must call this."""
        self.job = self.setting.job("ideal", cut=self.cut)
        self.loop = ReducedLoop(self.setting.world, replicas_of(self.job).chain.model, cut=self.cut)

    def step(self) -> float:
        """Make the run; return its mean loss. Collective: every rank must call this."""
        loop, images = self.loop, self.job.feed.images
        memory: list[HeldBatch] = []
        for batch in self.job.feed.epoch(0):
            activations = loop.output_of_prefix(images.load(batch.ids, batch.views))
            memory.append((activations, batch.labels))
            loop.suffix_step(activations, batch.labels)
        for _ in range(1, EPOCHS):
            for activations, labels in memory:
                loop.suffix_step(activations, labels)
        return loop.count.loss / loop.count.count
