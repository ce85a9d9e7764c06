"""What is the best that full fine-tuning does, and for how many epochs? And what does DistributedDataParallel do?

    python -m analysis.baseline --preset reduced --data-dir DIR --weights FILE

First the learning rate is chosen on held-out training samples. With it, full fine-tuning is run for several numbers of
epochs and reported on the test set: training for fewer epochs is what anybody can do instead of freezing, so this front
is what every other experiment is drawn against. Run this one first: the others take the learning rate from it.
"""

from __future__ import annotations

import sys

from analysis.sweeps import paper
from analysis.sweeps.charts import accuracy_time_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import COMPARED, Results, best_lr, budgets_of
from analysis.sweeps.statistics import is_below
from analysis.sweeps.sweep import main
from hvfreeze.report.tables import Table, percent

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


def whole(results: Results) -> str:
    """Return the label of full fine-tuning for as many epochs as the rivals had."""
    return f"epochs{next((row['epochs'] for row in results.of('ddp-static')), None)}"


def tested(results: Results) -> list[str]:
    """Return the labels of the front and of the rivals."""
    return [*budgets_of(results), *(name for name in ("ddp", "static", "ddp-static") if results.of(name))]


def answers(results: Results) -> list[Answer]:
    """Return what the baseline reaches, and how DistributedDataParallel compares."""
    front, found = budgets_of(results), []
    if front:
        best = results.most_accurate(front)
        text = f"{results.accuracy_text(best, count=True)} of the test images are right after {best[6:]} epochs."
        details = (
            (
                f"Training takes {results.time_text(best)}; the learning rate {results.of(best)[0]['lr']:g} was "
                "chosen on held-out training samples."
            ),
            (
                f"The study's own full run reached {percent(paper.FULL.accuracy)} ({paper.TABLE_1_SOURCE}), in another "
                "setting and not the bar."
            ),
        )
        found.append(Answer("How good is full fine-tuning here?", text, len(results.of(best)), details=details))
    reference = whole(results)
    if "ddp" in results.labels and reference in results.labels:
        full, frozen = results.gain(reference, "ddp"), results.gain("static", "ddp-static")
        text = (
            f"In full fine-tuning hvfreeze is {results.gain_text(reference, 'ddp', count=True)} as fast as "
            "DistributedDataParallel."
        )
        both = f"With {RIVAL_CUT} groups frozen statically in both: {results.gain_text('static', 'ddp-static')}."
        question = "And DistributedDataParallel over gloo on the same work?"
        negative = is_below(full, 1) or is_below(frozen, 1)
        found.append(Answer(question, text, full.n, negative=negative, details=(both,)))
    return found


def learning_rates(results: Results) -> Table:
    """Return the learning rates that were tried, with their accuracies on held-out training samples."""
    rates = [label for label in results.labels if label.startswith("lr")]
    tried = tuple((label[2:], results.accuracy_text(label)) for label in rates)
    return Table(title="Learning rates", columns=("Learning rate", "Accuracy on held-out samples"), rows=tried)


def tables(results: Results) -> list[Table]:
    """Return the choice of the learning rate, the front, and the rivals."""
    reference = whole(results)
    rows = tuple((label, *results.compared(label, reference)) for label in tested(results))
    return [learning_rates(results), Table(title=f"Against {reference}", columns=("Run", *COMPARED), rows=rows)]


def drawings(results: Results) -> list[Drawing]:
    """Return accuracy against time."""
    labels = tested(results)
    if not labels:
        return []
    about = "Test accuracy against training time of full fine-tuning and its rivals"
    figure = accuracy_time_chart(results, labels)
    return [Drawing("front", f"{about}; {results.spread(labels)}.", figure)]


LIMITS = (
    "The learning rate was chosen for full fine-tuning, at the default number of epochs; frozen runs use it too.",
    "DistributedDataParallel was given channels_last and our batches; its exchange is part of its backward phase.",
    "Ranks share one machine and its memory: no network is involved.",
)
EXPERIMENT = Experiment(
    "baseline",
    "Full fine-tuning for several numbers of epochs, and DistributedDataParallel",
    runs,
    answers,
    tables,
    drawings,
    LIMITS,
    then=then,
    chooses_lr=True,
    shown=2,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
