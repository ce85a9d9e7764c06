"""Verifying the files that a run finds, as a part of the run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import MANY_EPOCHS, Setting, replicas_of
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.rows.cached import KEPT, STEPS
from analysis.benchmarks.runs import epoch_of
from hvfreeze.cache.file.reader import ActivationFile

CUT = 5
EPOCHS = 10

DUEL = Duel(
    name="verification",
    ours="verification",
    reference="epoch",
    bound=1.03,
    ratio=lambda verification, epoch: 1 + verification / (EPOCHS * epoch),
    alike=False,
    what=f"1 + (open and verify a cache file) / ({EPOCHS} epochs from it), cut {CUT}, the shortest steps",
)


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the row of this case. Collective: every rank must call this."""
    setting = Setting.of(ranks, scratch, pace, steps=STEPS, epochs=MANY_EPOCHS)
    job = setting.job(DUEL.name, cut=CUT, cache=KEPT)
    epoch_of(job)
    replicas_of(job).training.activations.publish()
    (path,) = job.directory.rglob("*.h5")

    def verify() -> float:
        file = ActivationFile(path)
        file.verify()
        return float(file.manifest.rows)

    sides = [Side("verification", verify), Side("epoch", lambda: epoch_of(job))]
    yield from hold(ranks, sides, [DUEL], pace=pace)
    job.strategy.close()
