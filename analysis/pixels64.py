"""Does freezing pay more where early blocks cost more? Images twice as large, from weights trained at that size.

    python -m analysis.pixels64 --preset reduced --data-dir DIR --weights FILE

The setting is the preset's but for the image size and the weights, and the experiment has a baseline of its own: the
learning rate is chosen anew on held-out training samples, and full fine-tuning is run for several numbers of epochs.
Against that front stand what a user would choose: blocks frozen by vote as they settle, with fresh draws or with two
views of each sample and the cache, and a prefix that is frozen from the start and cached.
"""

from __future__ import annotations

import sys

from analysis.sweeps.experiment import main
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.questions import Answer, Drawing, Experiment
from analysis.sweeps.results import Results, best_lr
from analysis.sweeps.statistics import is_below, shown, signed_points
from analysis.writing.cells import COMPARED, FINAL_CUT, SAME_TIME, compared, final_cut, learning_rates, same_time
from analysis.writing.charts import IN_TIME, accuracy_time_chart
from hvfreeze.report.figures import plot_phases
from hvfreeze.report.tables import Table
from hvfreeze.report.units import factor, percent, seconds

LARGER = 2
LEARNING_RATES = (0.01, 0.02, 0.05, 0.1)
HELD_OUT = 0.2
EPOCHS = 0.5
"""Part of the preset's epochs: weights trained at this size need fewer, and each takes several times as long."""
BUDGETS = (0.2, 0.4, 0.6)
"""Epochs as parts of these, besides all of them."""
FULL = "full"
CACHED: dict[str, Value] = {"augment": "views:2", "cache": "auto"}
VOTED: dict[str, dict[str, Value]] = {
    "gradient-norm": {"freeze": "gradient-norm"},
    "geometric": {"freeze": "geometric"},
    "geometric-cached": {"freeze": "geometric", **CACHED},
}
STATIC: dict[str, dict[str, Value]] = {
    "cut4-cached": {"freeze": "static", "cut": 4, **CACHED},
    "cut5-cached": {"freeze": "static", "cut": 5, **CACHED},
}


def epochs_of(preset: Preset) -> int:
    """Return the number of epochs of all runs but the front's."""
    return max(2, round(EPOCHS * preset.epochs))


def scaled(preset: Preset) -> dict[str, Value]:
    """Return the flags of every run; what counts is the accuracy after the last epoch."""
    epochs = epochs_of(preset)
    return {"image_size": LARGER * preset.image_size, "epochs": epochs, "evaluate_every": epochs}


def runs(preset: Preset) -> list[PlannedRun]:
    """Return the runs that choose the learning rate."""
    held_out: dict[str, Value] = {**scaled(preset), "validation_fraction": HELD_OUT}
    return [preset.run(f"lr{lr:g}", preset.lr_seeds[0], {**held_out, "lr": lr}) for lr in preset.few(LEARNING_RATES)]


def then(preset: Preset, results: Results) -> list[PlannedRun]:
    """Return the front and what stands against it; a seed's runs follow each other in time."""
    common: dict[str, Value] = {**scaled(preset), "lr": best_lr(results.rows) or preset.lr}
    fewer = sorted({max(1, round(part * epochs_of(preset))) for part in preset.few(BUDGETS)})
    variants: dict[str, dict[str, Value]] = {f"epochs{epochs}": {"epochs": epochs} for epochs in fewer}
    variants[FULL] = {}
    variants.update({label: {"blocks": preset.fine, **flags} for label, flags in VOTED.items()})
    variants.update(STATIC)
    chosen = [f"epochs{fewer[0]}", FULL, "cut4-cached"] if preset.is_smoke else list(variants)
    return [preset.run(label, seed, {**common, **variants[label]}) for seed in preset.seeds for label in chosen]


def frozen_labels(results: Results) -> list[str]:
    """Return the labels of frozen runs that have rows."""
    return [label for label in (*VOTED, *STATIC) if results.of(label)]


def answers(results: Results) -> list[Answer]:
    """Return what our default criterion gives, which was chosen beforehand, then all others."""
    labels = frozen_labels(results)
    if not labels or not results.of(FULL):
        return []
    first = results.of(FULL)[0]
    gain, ahead = results.gain(labels[0], FULL), results.over_front(labels[0])
    texts = "; ".join(f"{results.shown_as(label)} {tally(results, label)}" for label in labels)
    text = (
        f"At {first['image_size']} pixels full fine-tuning reaches "
        f"{shown(results.mean(FULL, 'test_accuracy'), percent, count=True)} after {first['epochs']} epochs in "
        f"{shown(results.mean(FULL, 'train_seconds'), seconds)}. Speed-up over it, change of accuracy, and against "
        f"full fine-tuning trained for as many seconds: {texts}."
    )
    question = "Does it pay more with larger images and stronger weights?"
    return [Answer(question=question, text=text, n=gain.n, negative=is_below(gain, 1) or is_below(ahead, 0))]


def tally(results: Results, label: str) -> str:
    """Return a label's speed-up, its change of accuracy, and its lead over the front."""
    return (
        f"{shown(results.gain(label, FULL), factor)}, {shown(results.change(label, FULL), signed_points)}, "
        f"{shown(results.over_front(label), signed_points)}"
    )


def tables(results: Results) -> list[Table]:
    """Return the front and what stands against it, and the choice of the learning rate."""
    columns = ("Run", *COMPARED, SAME_TIME, FINAL_CUT)
    rows = []
    for label in timed_labels(results):
        ahead = same_time(results, label) if label in frozen_labels(results) else ""
        rows.append((results.shown_as(label), *compared(results, label, FULL), ahead, final_cut(results, label)))
    return [Table(columns=columns, rows=tuple(rows)), learning_rates(results)]


def timed_labels(results: Results) -> list[str]:
    """Return the labels of runs that were tested: fewer epochs, all of them, and the frozen ones."""
    return [label for label in results.labels if not label.startswith("lr")]


def drawings(results: Results) -> list[Drawing]:
    """Return accuracy against time, and the phases."""
    labels = frozen_labels(results)
    if not labels or not results.of(FULL):
        return []
    spread = f"mean and 95 % interval, {results.count([FULL, *labels])}"
    phases = plot_phases(results.runs_of(FULL, *labels))
    return [
        Drawing(
            name="accuracy-time",
            caption=f"{IN_TIME}; {spread}.",
            figure=accuracy_time_chart(results, [FULL, *labels]),
        ),
        Drawing(name="phases", caption=f"Training time by phase; {spread}.", figure=phases),
    ]


EXPERIMENT = Experiment(
    name="pixels64",
    title="Larger images and stronger weights",
    runs=runs,
    then=then,
    chooses_lr=True,
    answers=answers,
    tables=tables,
    drawings=drawings,
    reference=FULL,
    limits=(
        "Of the defaults below, image size, epochs and learning rate differ in all runs: twice, half, and chosen here.",
        "The learning rate was chosen for full fine-tuning, on one seed, and is the largest that was tried.",
        "The prefixes to freeze from the start were those of the caching experiment; no cut was searched for.",
        "The cache was allowed to the geometric criterion too and stored nothing: what differs there is the two views.",
        "CIFAR's images have 32 pixels and are enlarged: the work is that of larger images, the detail is not.",
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
