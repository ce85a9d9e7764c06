"""What a compression costs a step where the network costs next to nothing: ours with it against ours without."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import BATCH_ROWS, HeldSteps, Setting, replicas_of
from analysis.benchmarks.ranks import Ranks

COMPRESSIONS = {
    "compression_fp16": "fp16",
    "compression_powersgd4": "powersgd:4",
    "compression_powersgd16": "powersgd:16",
}


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    setting = Setting(world=ranks.world, scratch=scratch, batch_rows=pace.rows(BATCH_ROWS))
    names = [name for name in COMPRESSIONS if name in wanted]
    duels = [
        Duel(
            name=name,
            ours=name,
            reference="none",
            bound=1.03,
            what=f"training step of a ResNet-18, 32 px, nothing frozen, with --compression {COMPRESSIONS[name]}, "
            "against without, through the memory of one machine",
            alike=False,
        )
        for name in names
    ]
    sides = [side(setting, "none", "none"), *(side(setting, name, COMPRESSIONS[name]) for name in names)]
    yield from hold(ranks, sides, duels, pace=pace)


def side(setting: Setting, name: str, compression: str) -> Side:
    """Return a side that compresses from its first step on."""
    job = setting.job(name, compression=compression)
    replicas_of(job).reducer.uncompressed_steps = 0
    return Side(name, HeldSteps(job).step)
