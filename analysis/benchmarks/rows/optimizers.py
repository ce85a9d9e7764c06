"""Other ways of exchanging only the suffix's gradients: Horovod's optimizer pruned to the suffix, and one per block."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from analysis.benchmarks.contest import FUSED, Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import HeldSteps, Setting, held_batches
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.rows.unfrozen import horovod

CUT = 3
STEP = f"training step of a ResNet-18, 32 px, cut {CUT}"

DUELS = (
    Duel(
        name="frozen_step_vs_pruned_optimizer",
        ours="ours",
        reference="pruned",
        bound=1.02,
        what=f"{STEP}, against one hvd.DistributedOptimizer over the suffix",
    ),
    Duel(
        name="frozen_step_vs_optimizer_per_block",
        ours="ours",
        reference="per block",
        bound=1.02,
        what=f"{STEP}, against one hvd.DistributedOptimizer per block of the suffix",
    ),
)


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    setting = Setting.of(ranks, scratch, pace)
    duels = [duel for duel in DUELS if duel.name in wanted]
    job = setting.job("ours", cut=CUT)
    batches = held_batches(job)
    sides = [Side("ours", HeldSteps(job).step)]
    for name in (name for duel in duels for name in duel.references):
        sides.append(Side(name, horovod(batches, per_block=name == "per block", cut=CUT).step, FUSED))
    yield from hold(ranks, sides, duels, pace=pace)
