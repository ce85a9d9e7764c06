"""What do the strategies that spread one chain over ranks cost, beside what their papers predict?

    python -m analysis.strategies --preset reduced --data-dir DIR --weights FILE

Several models on one frozen trunk, split over three ranks or whole on each: time, processor seconds, bytes, memory,
ways of labels, batch sizes, and a cache that lets the line fall silent. One model in a grid of partitions and replicas:
its speed under the pipeline's bound, memory and bytes by the formula; ranks whose blocks are frozen or cached, dealt
out anew or waiting; and against replicas on two nodes at 1 Gbit/s of the local cluster; these runs come last, and
`--only` leaves them out where there can be no cluster. Layer groups that learn by critics: accuracy beside
backpropagation, of every exit, and of samples that leave early. A language model on a ring: loss by the age of its
gradients and the learning rate, and the time of a step. A perceptron in pieces: accuracy by bytes, beside local SGD.
"""

from __future__ import annotations

import sys

from analysis.parts.strategies import critic_runs, grid_runs, redealing_runs, ring_runs, subnet_runs, trunk_runs
from analysis.sweeps.charts import bar_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset
from analysis.sweeps.results import Results
from analysis.sweeps.sweep import main
from hvfreeze.report.tables import Table

PARTS = (trunk_runs, critic_runs, ring_runs, subnet_runs, grid_runs, redealing_runs)

TIMED = ("trunk", "grid", "frozen", "cached")
"""What labels begin with whose training times were measured on an idle machine."""


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
    found = [*ring_runs.drawings(results), *subnet_runs.drawings(results)]
    labels = [label for label in results.labels if label.startswith(TIMED)]
    if labels:
        bars = {label: results.mean(label, "train_seconds") for label in labels}
        caption = f"Training time, mean and 95 % interval where there are several seeds, {results.count(labels)}."
        found.insert(0, Drawing(name="training-time", caption=caption, figure=bar_chart(bars, x="seconds")))
    return found


EXPERIMENT = Experiment(
    name="strategies",
    title="Strategies: shared trunk, grid, local critics, stale ring, subnets and local SGD",
    runs=runs,
    then=then,
    answers=answers,
    tables=tables,
    drawings=drawings,
    shown=12,
    limits=(
        "Ranks share one machine; those that outnumber its cores take turns, and say nothing of speed.",
        "Networks are small and runs short: times are of tens of steps.",
        "Critics, and the ring's losses, ran while other programs computed on the machine: their times say little.",
        "Critics: scikit-learn's digits at 16 pixels, on which all are accurate; 15 epochs.",
        "The ring: steps of 8 windows of 32 characters; the text is Python's standard library.",
        "The perceptron's learning rate was the best of 0.01, 0.03 and 0.1 for replicas, on the test set of one seed.",
        "A perceptron's seconds at a bandwidth are a model: the bytes that a rank sends over the bandwidth, no more.",
        "A head's forward pass has no clock of its own; the prediction takes it for half of its backward pass.",
        "Peak memory is the process's from the first step on, mostly PyTorch's; at the end rank 0 joins the models.",
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
