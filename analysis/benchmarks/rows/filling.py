"""The epoch that fills the cache against the same epoch without one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import MANY_EPOCHS, Setting, replicas_of
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.rows.cached import KEPT
from analysis.benchmarks.runs import epoch_of
from hvfreeze.training.job import Job

FILLED_CUTS = (1, 5)
STEPS = 8
MIN_PAIRS = 5


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    setting = Setting.of(ranks, scratch, pace, steps=STEPS, epochs=MANY_EPOCHS)
    for cut in FILLED_CUTS:
        name = f"filling_epoch_cut{cut}"
        if name in wanted:
            filled, plain = setting.job(f"{name}-on", cut=cut, cache=KEPT), setting.job(f"{name}-off", cut=cut)
            epochs = FillingEpochs(filled)
            duel = Duel(
                name=name,
                ours="filling",
                reference="without",
                bound=1.10,
                what=f"epoch of {setting.steps} steps that fills the cache, and the wait until the file is safe, cut "
                f"{cut}, against the epoch with --cache off",
            )
            sides = [
                Side("filling", epochs.step, prepare=epochs.prepare),
                Side("without", lambda job=plain: epoch_of(job)),  # type: ignore[misc]
            ]
            yield from hold(ranks, sides, [duel], pace=pace.at_least(MIN_PAIRS))
            filled.strategy.close()


class FillingEpochs:
    """Epochs of a job that each find an empty cache."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def prepare(self) -> None:
        """Drop what is cached. Collective: every rank must call this."""
        replicas = replicas_of(self.job)
        replicas.training.move([0])
        replicas.training.move([replicas.freezer.cut])

    def step(self) -> float:
        """Make an epoch and wait for the file; return the sum of losses."""
        value = epoch_of(self.job)
        replicas_of(self.job).training.activations.publish()
        return value
