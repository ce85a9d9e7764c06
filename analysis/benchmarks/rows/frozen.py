"""Frozen at each cut: our step against a prefix forward without gradient and a suffix step, written by hand."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import CUTS, HeldSteps, Setting, held_batches, replicas_of
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.references import ReducedLoop, repeated

SLACK_SECONDS = 0.3e-3


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    setting = Setting.of(ranks, scratch, pace)
    for cut in CUTS:
        name = f"frozen_step_cut{cut}"
        if name in wanted:
            job = setting.job(name, cut=cut)
            loop = ReducedLoop(ranks.world, replicas_of(job).chain.model, cut=cut)
            sides = [
                Side("ours", HeldSteps(job).step),
                Side("by hand", repeated(loop.whole_step, held_batches(job))),
            ]
            duel = Duel(
                name=name,
                ours="ours",
                reference="by hand",
                bound=1.05,
                slack_seconds=SLACK_SECONDS,
                what=f"training step of a ResNet-18, 32 px, cut {cut}, against the same by hand with the same reducer",
            )
            yield from hold(ranks, sides, [duel], pace=pace)
