"""Local critic training: the runs, and their accuracy compared with backpropagation.

LC(n) has n critics, hence n + 1 groups. On CIFAR-10 the paper has 93.93 % for backpropagation, 92.06 for LC(1), 92.39
for LC(3) and 91.35 where critics learn from every fifth batch; 91.18 at 18 % of the FLOPs where samples leave early.
Source: Lee et al., "Local Critic Training for Model-Parallel Learning of Deep Neural Networks", arXiv 1805.01128.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, of_seeds, paired_difference, shown, within
from hvfreeze.report.tables import Table, percent

MODEL = "resnet20"
BACKPROPAGATION = "critics-none"
GROUPS: dict[str, dict[str, Value]] = {
    BACKPROPAGATION: {"strategy": "replicas", "blocks": "residual"},
    "critics-1": {"strategy": "local-critics", "parts": 2},
    "critics-3": {"strategy": "local-critics", "parts": 4},
    "critics-3-every5": {"strategy": "local-critics", "parts": 4, "critic_every": 5},
}
"""Settings by label; critics of all runs have the default learning rate."""
NAMES = {"critics-1": "LC(1)", "critics-3": "LC(3)", "critics-3-every5": "LC(3), critics every fifth batch"}


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


def told(results: Results, label: str, key: str) -> dict[int, Any]:
    """Return an entry of what runs of a label tell of their exits, by seed."""
    return results.of_runs(label, lambda run: (run.summary or {})["critics"][key])


def left_early(results: Results, label: str) -> dict[int, float]:
    """Return which part of the samples leave before the last exit, by seed."""
    return {seed: 1 - shares[-1] for seed, shares in told(results, label, "samples_by_exit").items()}


def share(values: Mapping[int, float]) -> str:
    """Return the mean over seeds of a share, with an interval that stays where a share can be."""
    return shown(within(of_seeds(values), 0, 1), percent)


def table(results: Results) -> str:
    """Return how right every exit is."""
    right = {label: share(results.values(label, "test_accuracy")) for label in GROUPS}
    rows: list[tuple[str, ...]] = [(BACKPROPAGATION, right[BACKPROPAGATION], *["-"] * 5)]
    for label in NAMES:
        exits, left = (
            [share(dict(enumerate(each))) for each in zip(*told(results, label, key).values(), strict=True)]
            for key in ("exit_accuracy", "samples_by_exit")
        )
        both = (share(told(results, label, key)) for key in ("ensemble_accuracy", "early_accuracy"))
        flops = shown(of_seeds(told(results, label, "early_flops")), percent)
        rows.append((label, right[label], ", ".join(exits[:-1]), *both, ", ".join(left), flops))
    columns = ("Run", "Whole model", "Exits before it", "All exits together", "Leaving at 0.9", "Samples by exit")
    return Table(columns=(*columns, "FLOPs of the whole model"), rows=tuple(rows)).to_text()


def words(results: Results) -> Words:
    early = told(results, "critics-3", "early_accuracy")
    change: Interval = paired_difference(early, results.values("critics-3", "test_accuracy"))
    return {
        "names": NAMES,
        "none": BACKPROPAGATION,
        "right": share(results.values(BACKPROPAGATION, "test_accuracy")),
        "flops": of_seeds(told(results, "critics-3", "early_flops")),
        "left": share(left_early(results, "critics-3")),
        "early": change,
        "table": table(results),
    }
