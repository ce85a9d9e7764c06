"""Does the vote harm scripts of one's own that train from scratch, in plain Horovod but for one line?

    python -m analysis.own_scripts --preset reduced

Two scripts (`analysis.parts.own_script`): the network of Horovod's MNIST example on scikit-learn's digits, enlarged to
28 pixels, and a transformer that tells of which package of Python's standard library a piece of source code is. They
differ in their optimizer's line, which is Horovod's or ours. No data need to be downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from analysis.sweeps.charts import FULL, METHOD_COLOURS, Line, line_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, is_below, of_seeds, shown
from analysis.sweeps.sweep import main
from hvfreeze.report.tables import Table

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
MOST_BEHIND = 0.005
"""Of accuracy, that is level all the same."""


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


def made(results: Results) -> Iterator[str]:
    """Yield the tasks with rows that can be held against each other."""
    return (name for name in TASKS if results.of(f"{name}-{PLAIN}") and results.of(f"{name}-{OURS}"))


def answers(results: Results) -> list[Answer]:
    """Return for each task how our optimizer's default stands to Horovod's."""
    found = []
    for name in made(results):
        ours, plain, published = (f"{name}-{way}" for way in (OURS, PLAIN, PUBLISHED))
        change, cut = results.change(ours, plain), results.cut(ours)
        details = [f"It ends at {results.accuracy_text(ours)}, with {shown(cut, blocks)} frozen."]
        if results.of(published):
            details.append(f"With gradient-norm: {results.change_text(published, plain)}.")
        found.append(
            Answer(
                f"Does the vote harm a script of one's own: {TASKS[name][0]}?",
                f"{results.change_text(ours, plain, count=True)} against {WORDS[PLAIN]}.",
                change.n,
                negative=is_below(change, -MOST_BEHIND),
                details=tuple(details),
            )
        )
    return found


def blocks(count: float) -> str:
    """Return a mean number of blocks in words."""
    return f"{count:.1f} blocks"


def tables(results: Results) -> list[Table]:
    """Return accuracies and last cuts."""
    rows = [
        (
            TASKS[name][0],
            WORDS[way],
            results.accuracy_text(label, count=True),
            "" if way == PLAIN else results.change_text(label, f"{name}-{PLAIN}"),
            shown(results.cut(label), lambda count: f"{count:.1f}"),
        )
        for name in made(results)
        for way in WORDS
        if results.of(label := f"{name}-{way}")
    ]
    columns = ("Script", "Optimizer", "Test accuracy", "Against Horovod's", "Blocks frozen at the end")
    return [Table(columns=columns, rows=tuple(rows), prose=frozenset({"Script", "Optimizer"}))]


def drawings(results: Results) -> list[Drawing]:
    """Return accuracy by epoch in the longest training of digits."""
    known = [way for way in WORDS if results.of(f"{DRAWN}-{way}")]
    if not known:
        return []
    lines = [
        Line(
            label=WORDS[way].strip("`"),
            colour=METHOD_COLOURS[FULL if way == PLAIN else way],
            points=course(results, way),
        )
        for way in known
    ]
    caption = f"Test accuracy by epoch, {TASKS[DRAWN][0]}; {results.spread([f'{DRAWN}-{way}' for way in known])}."
    return [Drawing("course", caption, line_chart(lines, x="epochs", y="test accuracy (%)", scale=100))]


def course(results: Results, way: str) -> dict[int, Interval]:
    """Return the accuracy after every `SHOWN_EACH` epochs, over seeds."""
    found = [results.runs[str(row["run"])].metrics for row in results.of(f"{DRAWN}-{way}")]
    last = len(found[0])
    return {
        epochs: of_seeds({seed: lines[epochs - 1]["test_accuracy"] for seed, lines in enumerate(found)})
        for epochs in range(1, last + 1)
        if epochs % SHOWN_EACH == 0 or epochs == last
    }


LIMITS = (
    "Small networks and small data, 2 ranks, batches of 32 a rank; seconds are not compared.",
    "One constant learning rate each, which was not searched for: SGD at 0.02 with momentum 0.5, and AdamW at 0.001.",
    "Steps an epoch and epochs are given to our optimizer, so that it votes twice an epoch from the end of the first.",
    "Horovod's `hvd.broadcast_optimizer_state` makes a step with gradients of 0, ours none; AdamW's decay shows it.",
    "Pieces of code are of the installed Python's library: other versions have others.",
)
EXPERIMENT = Experiment(
    "own_scripts",
    "The vote in scripts of one's own, from scratch",
    runs,
    answers,
    tables,
    drawings,
    LIMITS,
    own_seeds=True,
    one_factor=False,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
