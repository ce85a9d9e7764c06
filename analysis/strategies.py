"""What do the strategies that spread one chain over ranks cost, compared with the predictions of their papers?

    python -m analysis.strategies --preset reduced --data-dir DIR --weights FILE

Several models on one frozen trunk, split over three ranks or whole on each: time, processor seconds, bytes, memory,
ways of labels, batch sizes, and a cache that lets the line fall silent. One model in a grid of partitions and replicas:
its speed under the pipeline's bound, memory and bytes by the formula; ranks whose blocks are frozen or cached,
reassigned or idle; and against replicas on two nodes at 1 Gbit/s of the local cluster; these runs come last, and
`--only` leaves them out where there can be no cluster. Layer groups that learn by critics: accuracy compared with
backpropagation, of every exit, and of samples that leave early. A language model on a ring: loss by the age of its
gradients and the learning rate, and the time of a step. A perceptron in pieces: accuracy by bytes, compared with local
SGD.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from matplotlib.figure import Figure

from analysis.parts.strategies import critic_runs, grid_runs, redealing_runs, ring_runs, subnet_runs, trunk_runs
from analysis.sweeps.charts import bar_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset
from analysis.sweeps.results import Results
from analysis.sweeps.sweep import main

PARTS = {
    "trunk": trunk_runs,
    "critics": critic_runs,
    "ring": ring_runs,
    "subnets": subnet_runs,
    "grid": grid_runs,
    "redealing": redealing_runs,
}
TIMED = ("trunk", "grid", "frozen", "cached")
"""Prefixes of labels whose training times were measured on an idle machine."""


def runs(preset: Preset) -> list[PlannedRun]:
    """Return the runs on this machine."""
    return [each for part in PARTS.values() for each in part.planned(preset)]


def then(preset: Preset, results: Results) -> list[PlannedRun]:
    """Return the runs on nodes, which not every machine can make."""
    return grid_runs.planned_on_nodes(preset)


def timed(results: Results) -> list[str]:
    return [label for label in results.labels if label.startswith(TIMED)]


def words(results: Results) -> Words:
    return {**{name: part.words(results) for name, part in PARTS.items()}, "timed": timed(results)}


def drawings(results: Results) -> Mapping[str, Figure]:
    """Return training times, the ring's losses, and a perceptron's accuracy by bytes."""
    bars = {label: results.mean(label, "train_seconds") for label in timed(results)}
    return {
        "training-time": bar_chart(bars, x="seconds"),
        "ring-loss": ring_runs.chart(results),
        "perceptron-bytes": subnet_runs.chart(results),
    }


EXPERIMENT = Experiment(name="strategies", runs=runs, then=then, words=words, drawings=drawings)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
