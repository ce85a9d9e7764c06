"""Is a fitted head as good as a plain Horovod script's own epochs, and in which part of their time?

    python -m analysis.script_heads --preset reduced --data-dir DIR --weights FOLDER/resnet18-cifar100-32px-fp16.pt

DIR and FOLDER are `analysis.tasks`'. One script (`analysis.parts.head_script`) trains all layers in plain Horovod, or
calls `hvfreeze.fit_head` or `hvfreeze.fit_classifier` instead. The photographs' runs need timm.
"""

from __future__ import annotations

import sys

from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Metric, Results
from analysis.sweeps.statistics import signed_points
from analysis.sweeps.sweep import main
from analysis.tasks import LITE, RESNET
from hvfreeze.report.tables import seconds

PROGRAM = "analysis.parts.head_script"
EPOCHS = 4
PLAIN, HEAD, CLASSIFIER = "plain", "head", "classifier"
WAYS: dict[str, tuple[str, dict[str, Value]]] = {
    PLAIN: (f"all layers, {EPOCHS} epochs of plain Horovod", {"epochs": EPOCHS, "lr": 0.05}),
    HEAD: ("`hvfreeze.fit_head`", {"head_fit": "exact", "augment": "none"}),
    CLASSIFIER: (
        "`hvfreeze.fit_classifier`",
        {"head": "multi-level", "head_fit": "kernel", "augment": "none"},
    ),
}
"""Name -> what a reader knows it by, and its flags."""
CIFAR100: dict[str, Value] = {"mean": "0.5071,0.4865,0.4409", "std": "0.2673,0.2564,0.2762"}
TASKS: dict[str, tuple[str, dict[str, Value]]] = {
    "cifar": ("CIFAR-10, 5,000 images", {**RESNET, **CIFAR100, "train_samples": 5_000, "batch_size": 64}),
    "photographs": ("photographs of signed digits", {**LITE, "blocks": "residual", "batch_size": 16, "flips": "off"}),
}
"""Name, a folder of data -> what a reader knows it by, and its flags."""


def runs(preset: Preset) -> list[PlannedRun]:
    """Return all ways of every task."""
    if preset.is_smoke:
        tasks: dict[str, dict[str, Value]] = {
            "digits": {"data": "digits", "model": "resnet20", "train_samples": 64, "batch_size": 8}
        }
    else:
        tasks = {name: {"data": "imagefolder", "data_dir": f"./{name}", **flags} for name, (_, flags) in TASKS.items()}
    return [
        PlannedRun(
            label=f"{name}-{way}",
            seed=seed,
            flags={**flags, **own, "checkpoint_every": "0"},
            ranks=preset.ranks,
            program=PROGRAM,
        )
        for name, flags in tasks.items()
        for way, (_, own) in WAYS.items()
        for seed in preset.seeds
    ]


def processor_seconds(results: Results, label: str) -> float:
    """Return the processor seconds of all ranks, the mean over seeds."""
    spent = [float(run.metrics[-1]["processor_seconds"]) for run in results.runs_of(label)]
    return sum(spent) / len(spent)


def against(results: Results, name: str, way: str, *, n: bool = True) -> str:
    """Return by how many points a fitted head leads over the training epochs, and its share of their processor time.

    Without `n` there is neither an interval nor a count.
    """
    ours, theirs = f"{name}-{way}", f"{name}-{PLAIN}"
    share = f"{100 * processor_seconds(results, ours) / processor_seconds(results, theirs):.0f} %"
    if n:
        return f"{results.change(ours, theirs, n=True)} in {share} of the processor time"
    return f"{signed_points(results.difference(ours, theirs).mean)} in {share}"


def table(results: Results) -> str:
    """Return accuracy and processor seconds of all ways."""
    ways = {f"{name}-{key}": (told, way) for name, (told, _) in TASKS.items() for key, (way, _) in WAYS.items()}
    columns: list[str | Metric] = [
        Metric("Way", lambda r, label, _: ways[label][1]),
        "accuracy",
        Metric("Processor seconds, both ranks", lambda r, label, _: seconds(processor_seconds(r, label))),
    ]
    return results.compare("Task", {label: told for label, (told, _) in ways.items()}, columns, prose=["Way"])


def words(results: Results) -> Words:
    return {
        "tasks": {name: told for name, (told, _) in TASKS.items()},
        "gain": lambda name, way: against(results, name, way, n=False),
        "against": lambda name, way: against(results, name, way),
        "table": lambda: table(results),
    }


EXPERIMENT = Experiment(name="script_heads", runs=runs, words=words, one_factor=False)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
