"""Does the vote harm custom scripts that train from scratch, in plain Horovod but for one line?

    python -m analysis.own_scripts --preset reduced

Two scripts (`analysis.parts.own_script`): the network of Horovod's MNIST example on scikit-learn's digits, enlarged to
28 pixels, and a transformer that tells of which package of Python's standard library a piece of source code is. They
differ in their optimizer's line, which is Horovod's or ours. No data need to be downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from matplotlib.figure import Figure

from analysis.sweeps.charts import FULL, METHOD_COLOURS, Line, line_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Metric, Results
from analysis.sweeps.statistics import Interval, of_seeds
from analysis.sweeps.sweep import main

PROGRAM = "analysis.parts.own_script"
SEEDS = (0, 1, 2, 3, 4)
PLAIN, OURS, PUBLISHED = "none", "coherence", "gradient-norm"
WORDS = {PLAIN: "`hvd.DistributedOptimizer`", OURS: "ours", PUBLISHED: "ours, gradient-norm"}
TASKS: dict[str, tuple[str, dict[str, Value]]] = {
    "digits-12": (
        "the network of Horovod's MNIST example, digits, 12 epochs",
        {"data": "digits", "model": f"{PROGRAM}:digits_network", "lr": 0.02, "momentum": 0.5, "epochs": 12},
    ),
    "digits-48": (
        "the network of Horovod's MNIST example, digits, 48 epochs",
        {"data": "digits", "model": f"{PROGRAM}:digits_network", "lr": 0.02, "momentum": 0.5, "epochs": 48},
    ),
    "code-12": (
        "a transformer on source code, 12 epochs",
        {"data": "text", "model": f"{PROGRAM}:code_network", "lr": 0.001, "optimizer": "adamw", "epochs": 12},
    ),
}
"""Name -> what a reader knows it by, and its flags."""
DRAWN = "digits-48"
"""The task whose course the figure shows."""
SHOWN_EACH = 6


def runs(preset: Preset) -> list[PlannedRun]:
    """Return all ways of every task, a seed after the other."""
    seeds = (0,) if preset.is_smoke else SEEDS
    tasks = (
        {DRAWN: {**TASKS[DRAWN][1], "epochs": 2}}
        if preset.is_smoke
        else {name: own for name, (_, own) in TASKS.items()}
    )
    return [
        PlannedRun(
            label=f"{name}-{way}",
            seed=seed,
            flags={**flags, "batch_size": 32, "freeze": way, "checkpoint_every": "0"},
            ranks=preset.ranks,
            program=PROGRAM,
        )
        for seed in seeds
        for name, flags in tasks.items()
        for way in WORDS
        if way != PUBLISHED or name == DRAWN
    ]


def task_of(label: str) -> tuple[str, str]:
    """Return the task and the way of a label."""
    name = next(name for name in TASKS if label.startswith(f"{name}-"))
    return name, label.removeprefix(f"{name}-")


def against_horovod(results: Results, label: str, _: str) -> str:
    """Return a cell of the table."""
    name, way = task_of(label)
    return "" if way == PLAIN else results.change(label, f"{name}-{PLAIN}")


def words(results: Results) -> Words:
    made = [f"{name}-{way}" for name in TASKS for way in WORDS if way != PUBLISHED or name == DRAWN]
    return {
        "tasks": {name: told for name, (told, _) in TASKS.items()},
        "made_as": {label: TASKS[task_of(label)[0]][0] for label in made},
        "columns": [
            Metric("Optimizer", lambda r, label, _: WORDS[task_of(label)[1]]),
            "accuracy+n",
            Metric("Against Horovod's", against_horovod),
            "cut",
        ],
        "frozen": lambda label: results.cut(label).replace(" ", " blocks ", 1),
    }


def drawings(results: Results) -> Mapping[str, Figure]:
    """Return accuracy by epoch in the longest training of digits."""
    lines = [
        Line(label=told.strip("`"), colour=METHOD_COLOURS[FULL if way == PLAIN else way], points=course(results, way))
        for way, told in WORDS.items()
    ]
    return {"course": line_chart(lines, x="epochs", y="test accuracy (%)", scale=100)}


def course(results: Results, way: str) -> dict[int, Interval]:
    """Return the accuracy after every `SHOWN_EACH` epochs, over seeds."""
    found = [run.metrics for run in results.runs_of(f"{DRAWN}-{way}")]
    last = len(found[0])
    return {
        epochs: of_seeds({seed: lines[epochs - 1]["test_accuracy"] for seed, lines in enumerate(found)})
        for epochs in range(1, last + 1)
        if epochs % SHOWN_EACH == 0 or epochs == last
    }


EXPERIMENT = Experiment(name="own_scripts", runs=runs, words=words, drawings=drawings, own_seeds=True, one_factor=False)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
