"""Intervals of few steps, each with a vote at its end, against the same steps without votes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import MANY_EPOCHS, HeldSteps, Setting
from analysis.benchmarks.ranks import Ranks
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.training.job import Job

INTERVAL = 4
BATCH_ROWS = 24
"""Steps as in `make demo`: a vote costs most if steps are short."""
UNMOVED = 1e-12
"""A bound on eta that no block keeps, so that both sides train the same blocks."""
VOTED = FreezeConfig(freeze="gradient-norm", interval=INTERVAL, freeze_warmup=INTERVAL, eta_max=UNMOVED)


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    setting = Setting.of(ranks, scratch, pace, batch_rows=BATCH_ROWS, epochs=MANY_EPOCHS)
    duel = Duel(
        name="vote_every_4_steps",
        ours="voted",
        reference="without",
        bound=1.02,
        what=f"{INTERVAL} steps of a ResNet-18, 32 px, batch {setting.batch_rows}, nothing frozen, and a vote that "
        "moves nothing, against the steps alone",
    )
    if duel.name in wanted:
        sides = [
            Side("voted", Intervals(setting.job("voted", freeze=VOTED)).step),
            Side("without", Intervals(setting.job("without")).step),
        ]
        yield from hold(ranks, sides, [duel], pace=pace)


class Intervals:
    """`INTERVAL` training steps of a job at a time."""

    def __init__(self, job: Job) -> None:
        self._steps = HeldSteps(job)

    def step(self) -> float:
        """Make an interval's steps; return their mean loss."""
        return sum(self._steps.step() for _ in range(INTERVAL)) / INTERVAL
