"""Full fine-tuning for several numbers of epochs, and DistributedDataParallel on the same work.

    python -m analysis.baseline --preset reduced --data-dir DIR --weights FILE

First the learning rate is chosen on held-out training samples. With it, full fine-tuning is run for several numbers of
epochs and reported on the test set: training for fewer epochs is what anybody can do instead of freezing, so this front
is what every other experiment is drawn against. Run this one first: the others take the learning rate from it.
"""

from __future__ import annotations

import sys

from analysis.sweeps import paper
from analysis.sweeps.charts import accuracy_time_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results, best_lr, budgets_of
from analysis.sweeps.sweep import main

LEARNING_RATES = (0.005, 0.01, 0.02, 0.05, 0.1)
HELD_OUT = 0.2
BUDGETS = (0.1, 0.2, 0.4, 0.6, 1.0, 1.6)
"""Epochs as parts of the preset's."""
RIVAL_CUT = 4
"""Frozen groups in the comparison with DistributedDataParallel; the study's headline."""
DDP = "analysis.ddp"


def runs(preset: Preset) -> list[PlannedRun]:
    """Return the runs that choose the learning rate."""
    return [
        preset.run(f"lr{lr:g}", seed, {"lr": lr, "validation_fraction": HELD_OUT})
        for lr in preset.few(LEARNING_RATES)
        for seed in preset.lr_seeds
    ]


def then(preset: Preset, results: Results) -> list[PlannedRun]:
    """Return the front at the learning rate chosen, and the rivals on the same work."""
    full: dict[str, Value] = {"lr": best_lr(results.rows) or preset.lr}
    frozen: dict[str, Value] = {**full, "blocks": preset.coarse, "freeze": "static", "cut": RIVAL_CUT}
    budgets = sorted({max(1, round(part * preset.epochs)) for part in BUDGETS} | {preset.epochs})
    planned = [
        preset.run(f"epochs{epochs}", seed, {**full, "epochs": epochs})
        for epochs in ([1] if preset.is_smoke else budgets)
        for seed in preset.seeds
    ]
    # Side by side in time, so that whatever else the machine does meets all of them.
    for seed in preset.seeds:
        if not preset.is_smoke:
            planned.append(preset.run("static", seed, frozen))
            planned.append(preset.run("ddp", seed, full, program=DDP))
        planned.append(preset.run("ddp-static", seed, frozen, program=DDP))
    return planned


def tested(results: Results) -> list[str]:
    """Return the labels of the front and of the rivals."""
    return [*budgets_of(results), "ddp", "static", "ddp-static"]


def rates_table(results: Results) -> str:
    """Return the learning rates that were tried, with their accuracies on held-out training samples."""
    tried = {label: label[2:] for label in results.labels if label.startswith("lr")}
    return results.compare("Learning rate", tried, ["accuracy"], accuracy="Accuracy on held-out samples")


def words(results: Results) -> Words:
    return {
        "tested": tested(results),
        "best": results.most_accurate(budgets_of(results)),
        "rates": rates_table(results),
        "paper": paper,
    }


EXPERIMENT = Experiment(
    name="baseline",
    runs=runs,
    then=then,
    words=words,
    drawings=lambda results: {"front": accuracy_time_chart(results, tested(results))},
    chooses_lr=True,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
