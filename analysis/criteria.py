"""Which criterion freezes what has stopped learning, where blocks are trained from the first step on?

    python -m analysis.dots DIR/counting
    python -m analysis.criteria --preset reduced --data-dir DIR --weights FOLDER/resnet18-cifar100-32px-fp16.pt

DIR has a folder {train,test}/CLASS for each task: `counting`, and `cifar` (CIFAR-10), on which a small network also
begins from scratch. No head is fitted and nothing is cached, so only the criterion matters. Work takes the place of
time. A step is counted in forward passes, a backward pass with its update as three, so other programs do not blur it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from matplotlib.figure import Figure

from analysis.sweeps.charts import FULL, Way, ways_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, of_seeds, paired_difference, shown, signed_points
from analysis.sweeps.sweep import main
from analysis.tasks import RESNET
from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.model.model_sources import build_model
from hvfreeze.model.segments import work_of
from hvfreeze.report.tables import Table, percent
from hvfreeze.runs.reading import Run
from hvfreeze.training.budget import BACKWARD

SAMPLES, CLASSES, SIDE = 5_000, 10, 32
NONE, OURS = "none", "coherence"
EPOCHS: dict[str, tuple[int, ...]] = {
    NONE: (4, 8),
    OURS: (4, 6, 8),
    "gradient-norm": (8,),
    "linear": (8, 12),
    "geometric": (8, 12),
}
"""Criterion -> how long it trains; schedules longer too, for as much work as what freezes little."""
LONGEST = 8
TOO_EARLY = 0.5
"""Points of accuracy behind nothing frozen from which on blocks count as frozen too early."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task, and the network that it begins with."""

    words: str
    flags: Mapping[str, Value]


TASKS = {
    "counting": Task(words="counting dots in noise", flags={"data_dir": "./counting", **RESNET}),
    "near": Task(words="CIFAR-10", flags={"data_dir": "./cifar", "train_samples": SAMPLES, **RESNET}),
    "scratch": Task(
        words="CIFAR-10 from scratch",
        flags={"data_dir": "./cifar", "train_samples": SAMPLES, "model": "resnet20", "weights": "none"},
    ),
}
COMMON: dict[str, Value] = {
    "data": "imagefolder",
    "batch_size": 64,
    "lr": 0.05,
    "schedule": "cosine",
    "checkpoint_every": "0",
    "cache": "off",
}


def runs(preset: Preset) -> list[PlannedRun]:
    """Return all criteria on every task, one seed after the other."""
    if preset.is_smoke:
        return preset.runs({f"near-{way}-{LONGEST}": {"freeze": way} for way in (NONE, OURS)}, {})
    return [
        PlannedRun(
            label=label_of(name, way, epochs),
            seed=seed,
            flags={**COMMON, **task.flags, "freeze": way, "epochs": epochs, "evaluate_every": epochs},
            ranks=preset.ranks,
        )
        for seed in preset.seeds
        for name, task in TASKS.items()
        for way, lengths in EPOCHS.items()
        for epochs in lengths
    ]


def label_of(name: str, way: str, epochs: int) -> str:
    """Return the label of a criterion's runs on a task."""
    return f"{name}-{way}-{epochs}"


@cache
def work_of_blocks(model: str) -> list[int]:
    """Return the work of a forward pass through each block of a model."""
    built = build_model(model, num_classes=CLASSES, image_size=SIDE).model
    return work_of(cut_into_blocks(built), torch.zeros(1, 3, SIDE, SIDE))


def work(run: Run) -> float:
    """Return the work of a run in epochs of training without a frozen block."""
    blocks = work_of_blocks(run.settings["model"])
    moves = [(int(step), int(cut)) for _, step, cut in (run.summary or {})["cut_history"]]
    last = run.metrics[-1]
    spent: float = sum(
        (until - step) * (1 + BACKWARD * (1 - sum(blocks[:cut]) / sum(blocks)))
        for (step, cut), (until, _) in pairwise([*moves, (int(last["step"]), 0)])
    )
    return spent / (1 + BACKWARD) / (int(last["step"]) / len(run.metrics))


def works(results: Results, label: str) -> Interval:
    """Return the work of a label's runs."""
    return of_seeds({int(row["seed"]): work(results.runs[str(row["run"])]) for row in results.of(label)})


def lost(results: Results, name: str, way: str, epochs: int) -> Interval:
    """Return accuracy against nothing frozen for as many epochs; of no runs where there are none as long."""
    nothing = label_of(name, NONE, epochs)
    ours = results.values(label_of(name, way, epochs), "test_accuracy")
    return paired_difference(ours, results.values(nothing, "test_accuracy") if results.has(nothing) else {})


def rivals(results: Results, name: str) -> list[str]:
    """Return each schedule with the longest coherence run of at most equal work; empty if there is none."""
    found = []
    for way in ("linear", "geometric"):
        for epochs in EPOCHS[way]:
            label = label_of(name, way, epochs)
            limit = 1.05 * works(results, label).mean
            ours = [label_of(name, OURS, length) for length in EPOCHS[OURS]]
            fitting = [mine for mine in ours if works(results, mine).mean <= limit]
            if fitting:
                ahead = results.change(fitting[-1], label)
                spent = works(results, label).mean
                found.append(f"With at most the work of {epochs} epochs of {way} ({spent:.1f}): {ahead}.")
    return found


def table(results: Results) -> str:
    """Return what each criterion loses by freezing too early, and what it spends by freezing late or never."""
    columns = ("Task", "Criterion", "Epochs", "Test accuracy", "Against nothing frozen", "Work", "Last cut", "Frozen")
    cases = ((name, way, n) for name in TASKS for way, lengths in EPOCHS.items() for n in lengths)
    rows = tuple(row_of(results, *case) for case in cases)
    return Table(columns=columns, rows=rows, prose=frozenset({"Task", "Criterion"})).to_text()


def row_of(results: Results, name: str, way: str, epochs: int) -> tuple[str, ...]:
    """Return a row of the table."""
    label = label_of(name, way, epochs)
    spent, change = works(results, label), lost(results, name, way, epochs)
    return (
        TASKS[name].words,
        way,
        str(epochs),
        shown(results.mean(label, "test_accuracy"), percent, count=True),
        "" if way == NONE or not change.n else shown(change, signed_points),
        f"{spent.mean:.1f}",
        results.cut(label),
        "" if way == NONE else judged(change, spent.mean / epochs),
    )


def judged(change: Interval, part: float) -> str:
    """Return whether blocks were frozen too early, or late, in words; `part` is of the work of freezing nothing."""
    saved = f"saves {100 * (1 - part):.0f} %"
    if change.n and 100 * change.mean < -TOO_EARLY:
        return f"too early: loses {-100 * change.mean:.1f} points, {saved}"
    return saved if part < 1 else "nothing"


def words(results: Results) -> Words:
    return {
        "tasks": TASKS,
        "rivals": lambda name: rivals(results, name),
        "part": lambda label: f"{works(results, label).mean / LONGEST:.2f}",
        "table": table(results),
    }


def drawings(results: Results) -> Mapping[str, Figure]:
    """Return a figure of accuracy against work on each task."""

    def way_of(name: str, way: str) -> Way:
        labels = [label_of(name, way, epochs) for epochs in EPOCHS[way]]
        points = [(works(results, label), results.mean(label, "test_accuracy")) for label in labels]
        return Way(FULL if way == NONE else way, points)

    panels = {task.words: [way_of(name, way) for way in EPOCHS] for name, task in TASKS.items()}
    return {"criteria": ways_chart(panels, reference=FULL, ours=[OURS], x="work (epochs)")}


EXPERIMENT = Experiment(name="criteria", runs=runs, words=words, drawings=drawings, chooses_lr=True, one_factor=False)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
