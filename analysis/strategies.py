"""What do the strategies that spread one chain over ranks cost, beside what their papers predict?

    python -m analysis.strategies --preset reduced --data-dir DIR --weights FILE

Several models on one frozen trunk, split over three ranks or whole on each: time, processor seconds, bytes, memory,
ways of labels, batch sizes, and a cache that lets the line fall silent. One model in a grid of partitions and replicas:
its speed under the pipeline's bound, memory and bytes by the formula; ranks whose blocks are frozen or cached, dealt
out anew or waiting; and against replicas on two nodes at 1 Gbit/s of the local cluster; these runs come last, and
`--only` leaves them out where there can be no cluster. Layer groups that learn by critics: accuracy beside
backpropagation, of every exit, and of samples that leave early.
"""

from __future__ import annotations

import sys

from analysis.parts.strategies import critic_runs, grid_runs, redealing_runs, ring_runs, trunk_runs
from analysis.sweeps.charts import bar_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset
from analysis.sweeps.results import Results
from analysis.sweeps.sweep import main
from hvfreeze.report.tables import Table

PARTS = (trunk_runs, critic_runs, ring_runs, grid_runs, redealing_runs)


def runs(preset: Preset) -> list[PlannedRun]:
    """Return the runs on this machine."""
    return [each for part in PARTS for each in part.planned(preset)]


def then(preset: Preset, results: Results) -> list[PlannedRun]:
    """Return the runs on nodes, which not every machine can make."""
    return grid_runs.planned_on_nodes(preset)


def answers(results: Results) -> list[Answer]:
    """Return what the strategies cost and give."""
    return [each for part in PARTS for each in part.answers(results)]


def tables(results: Results) -> list[Table]:
    """Return the strategies' tables."""
    return [each for part in PARTS for each in part.tables(results)]


def drawings(results: Results) -> list[Drawing]:
    """Return every run's training time."""
    bars = {label: results.mean(label, "train_seconds") for label in results.labels}
    if not bars:
        return []
    caption = f"Training time, mean and 95 % interval where there are several seeds, {results.count(results.labels)}."
    return [Drawing(name="training-time", caption=caption, figure=bar_chart(bars, x="seconds"))]


EXPERIMENT = Experiment(
    name="strategies",
    title="Several models on one trunk, one model in a grid, and layer groups that learn by critics",
    runs=runs,
    then=then,
    answers=answers,
    tables=tables,
    drawings=drawings,
    shown=3,
    limits=(
        "Ranks share one machine; those that outnumber its cores take turns, and say nothing of speed.",
        "Networks are small and runs short: times are of tens of steps.",
        "Runs of layer groups that learn by critics are planned here, and none is kept yet.",
        "A head's forward pass has no clock of its own; the prediction takes it for half of its backward pass.",
        "Peak memory is the process's from the first step on, mostly PyTorch's; at the end rank 0 joins the models.",
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
