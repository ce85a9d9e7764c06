"""How long the steps of runs took, by phase, with their spread over runs or, of one run, over its epochs."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.sweeps.kept import unlike
from analysis.sweeps.statistics import Interval, mean_interval
from hvfreeze.runs.reading import Run


def phase(runs: Sequence[Run], *names: str) -> Interval:
    """Return seconds a step in some phases: the spread is that of runs, of one run that of its timed epochs."""
    each = [of_epochs(run, *names) for run in runs]
    return each[0] if len(each) == 1 else mean_interval([interval.mean for interval in each])


def of_epochs(run: Run, *names: str) -> Interval:
    """Return seconds a step in some phases, over the epochs that are timed."""
    found, left_out = [], unlike(run)
    for before, line in list(zip(run.metrics, run.metrics[1:]))[max(0, left_out - 1) :]:
        spent = sum(line["seconds"].get(name, 0.0) for name in names)
        found.append(spent / (line["step"] - before["step"]))
    return mean_interval(found)


def step(runs: Sequence[Run]) -> Interval:
    """Return seconds a step."""
    return phase(runs, *runs[0].seconds.keys() - {"evaluate"})


def compute(runs: Sequence[Run]) -> Interval:
    """Return seconds a step in which the rank computes."""
    return phase(runs, "forward", "backward", "optimizer")


def pace(runs: Sequence[Run]) -> Interval:
    """Return the images that all ranks train in a second."""
    taken, images = step(runs), runs[0].size * runs[0].settings["batch_size"]
    return Interval(images / taken.mean, images / taken.high, images / taken.low, taken.n)


def images(value: float) -> str:
    """Return a pace for a person."""
    return f"{value:.0f} images/s"
