"""A step from the cache against the same suffix step on activations that are in memory already."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import CUTS, EpochSteps, HeldBatch, Setting, held_batches, replicas_of
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.references import ReducedLoop, repeated
from hvfreeze.config.cache import CacheConfig
from hvfreeze.training.loop import train_epoch

SLACK_SECONDS = 0.3e-3
STEPS = 12
LARGE_SIDE, LARGE_ROWS, LARGE_STEPS = 224, 16, 3
LARGE_CUTS = (2, 4)

KEPT = CacheConfig(cache="on")


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    small = Setting.of(ranks, scratch, pace, steps=STEPS)
    large = Setting.of(ranks, scratch, pace, batch_rows=LARGE_ROWS, steps=LARGE_STEPS, side=LARGE_SIDE)
    cases = [(f"cached_step_cut{cut}", cut, small) for cut in CUTS]
    cases += [(f"cached_step_{LARGE_SIDE}px_cut{cut}", cut, large) for cut in LARGE_CUTS]
    for name, cut, setting in cases:
        if name in wanted:
            yield from contest(ranks, name, cut, setting, pace)


def contest(ranks: Ranks, name: str, cut: int, setting: Setting, pace: Pace) -> list[Row]:
    """Fill a cache, then measure. Collective: every rank must call this."""
    job = setting.job(name, cut=cut, cache=KEPT)
    train_epoch(job, 0)
    loop = ReducedLoop(ranks.world, replicas_of(job).chain.model, cut=cut)
    for x, labels in held_batches(job):
        loop.whole_step(x, labels)
    memory: list[HeldBatch] = [(loop.output_of_prefix(x), labels) for x, labels in held_batches(job, epoch=1)]
    steps = EpochSteps(job, epoch=1)
    duel = Duel(
        name=name,
        ours="cache",
        reference="memory",
        bound=1.05,
        slack_seconds=SLACK_SECONDS,
        what=f"training step from the cache, ResNet-18, {setting.side} px, cut {cut}, batch {setting.batch_rows}, "
        "against the same suffix step on activations in memory",
    )
    sides = [
        Side("cache", steps.step, prepare=steps.prepare),
        Side("memory", repeated(loop.suffix_step, memory)),
    ]
    rows = hold(ranks, sides, [duel], pace=pace)
    if replicas_of(job).training.activations.counters.forwards > setting.steps:
        raise ValueError(f"{name}: the prefix was computed while it should have been read")
    job.strategy.close()
    return rows
