"""Layer groups that learn by what critics predict: the runs, and how right they are beside backpropagation.

LC(n) has n critics, hence n + 1 groups. On CIFAR-10 the paper has 93.93 % for backpropagation, 92.06 for LC(1), 92.39
for LC(3) and 91.35 where critics learn from every fifth batch; 91.18 at 18 % of the FLOPs where samples leave early.
Source: Lee et al., "Local Critic Training for Model-Parallel Learning of Deep Neural Networks", arXiv 1805.01128.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.sweeps.experiment import Answer
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, of_seeds, paired_difference, shown, signed_points, within
from hvfreeze.report.tables import Table, percent
from hvfreeze.runs.reading import Run

MODEL = "resnet20"
BACKPROPAGATION = "critics-none"
GROUPS: dict[str, dict[str, Value]] = {
    BACKPROPAGATION: {"strategy": "replicas", "blocks": "residual"},
    "critics-1": {"strategy": "local-critics", "parts": 2},
    "critics-3": {"strategy": "local-critics", "parts": 4},
    "critics-3-every5": {"strategy": "local-critics", "parts": 4, "critic_every": 5},
}
"""By label; critics of all runs have their own learning rate's default."""
NAMES = {"critics-1": "LC(1)", "critics-3": "LC(3)", "critics-3-every5": "LC(3), critics every fifth batch"}
MOST_LOST, MOST_LOST_EARLY, LEAST_EARLY = 0.02, 0.01, 0.5
"""What is hoped of LC(3): accuracy lost against backpropagation, by leaving early, and the samples that do."""


def planned(preset: Preset) -> list[PlannedRun]:
    """Return the runs, of one process each: on more ranks they have the same bits."""
    labels = ("critics-3",) if preset.is_smoke else tuple(GROUPS)
    return [run(preset, label, seed=seed) for seed in preset.seeds for label in labels]


def run(preset: Preset, label: str, *, seed: int) -> PlannedRun:
    """Return a run of the critics' part of the experiment: a ResNet-20 from scratch on scikit-learn's digits."""
    flags: dict[str, Value] = {
        "data": "digits",
        "model": MODEL,
        "image_size": 16,
        "batch_size": 16 if preset.is_smoke else 64,
        "epochs": 1 if preset.is_smoke else 15,
        "lr": 0.1,
        "schedule": "cosine",
        "evaluate_every": 15,
        "checkpoint_every": "0",
        "threads": 1,
    }
    if preset.is_smoke:
        flags["train_samples"] = 64
    return PlannedRun(label=label, seed=seed, flags={**flags, **GROUPS[label]}, ranks=1)


def critics_of(run: Run) -> dict[str, Any]:
    """Return what a run's summary tells of its exits."""
    found: dict[str, Any] = (run.summary or {}).get("critics") or {}
    return found


def told(results: Results, label: str, key: str) -> dict[int, Any]:
    """Return an entry of what runs of a label tell of their exits, by seed."""
    runs = results.runs_of(label) if results.of(label) else []
    return {run.settings["seed"]: critics_of(run)[key] for run in runs if key in critics_of(run)}


def accuracies(results: Results, label: str) -> dict[int, float]:
    """Return how right the whole models of a label are, by seed."""
    return {seed: float(value) for seed, value in results.values(label, "test_accuracy").items()}


def left_early(results: Results, label: str) -> dict[int, float]:
    """Return which part of the samples leave before the last exit, by seed."""
    return {seed: 1 - shares[-1] for seed, shares in told(results, label, "samples_by_exit").items()}


def share(values: Mapping[int, float]) -> str:
    """Return the mean over seeds of a share, with an interval that stays where a share can be."""
    return shown(within(of_seeds(values), 0, 1), percent)


def labels_of(results: Results) -> list[str]:
    """Return the labels of runs with exits."""
    return [label for label in GROUPS if told(results, label, "exit_accuracy")]


def answers(results: Results) -> list[Answer]:
    """Return what is said of critics."""
    found, label = [], "critics-3"
    if label not in labels_of(results):
        return []
    if results.of(BACKPROPAGATION):
        reference = accuracies(results, BACKPROPAGATION)
        changes = {each: paired_difference(accuracies(results, each), reference) for each in labels_of(results)}
        changed = shown(changes[label], signed_points, count=True)
        text = f"Accuracy against backpropagation, by {NAMES[label]}: {changed}."
        details = (
            f"Backpropagation: {share(reference)}. Against it:",
            *(f"{NAMES[each]} {shown(change, signed_points)}" for each, change in changes.items()),
        )
        fails = changes[label].mean < -MOST_LOST
        question = "What does training by critics cost?"
        found.append(Answer(question=question, text=text, n=changes[label].n, negative=fails, details=details))
    early, whole = told(results, label, "early_accuracy"), accuracies(results, label)
    change: Interval = paired_difference(early, whole)
    left = of_seeds(left_early(results, label))
    taken = shown(of_seeds(told(results, label, "early_flops")), percent, count=True)
    text = f"By LC(3) samples take {taken} of the FLOPs of the whole model, on average."
    details = (
        f"{shown(within(left, 0, 1), percent)} of the samples leave before the last of four exits.",
        f"Accuracy against the whole model: {shown(change, signed_points)}.",
    )
    fails = left.mean < LEAST_EARLY or change.mean < -MOST_LOST_EARLY
    question = "What does leaving at a probability of 0.9 save?"
    found.append(Answer(question=question, text=text, n=change.n, negative=fails, details=details))
    return found


def tables(results: Results) -> list[Table]:
    """Return how right every exit is."""
    rows: list[tuple[str, ...]] = []
    if results.of(BACKPROPAGATION):
        rows.append((BACKPROPAGATION, share(accuracies(results, BACKPROPAGATION)), *["-"] * 5))
    for label in labels_of(results):
        exits, shares = told(results, label, "exit_accuracy"), told(results, label, "samples_by_exit")
        means = [share(dict(enumerate(each))) for each in zip(*exits.values(), strict=True)]
        left = [share(dict(enumerate(each))) for each in zip(*shares.values(), strict=True)]
        rows.append(
            (
                label,
                share(accuracies(results, label)),
                ", ".join(means[:-1]),
                *(share(told(results, label, key)) for key in ("ensemble_accuracy", "early_accuracy")),
                ", ".join(left),
                shown(of_seeds(told(results, label, "early_flops")), percent),
            )
        )
    columns = (
        "Run",
        "Whole model",
        "Exits before it",
        "All exits together",
        "Leaving at 0.9",
        "Samples by exit",
        "FLOPs of the whole model",
    )
    return [Table(title="Accuracy of exits", columns=columns, rows=tuple(rows))] if rows else []
