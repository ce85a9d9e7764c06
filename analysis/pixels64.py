"""Does freezing pay more where early blocks cost more? Images twice as large, from weights trained at that size.

    python -m analysis.pixels64 --preset reduced --data-dir DIR --weights FILE

The setting is the preset's but for the image size and the weights, and the experiment has a baseline of its own: the
learning rate is chosen anew on held-out training samples, and full fine-tuning is run for several numbers of epochs.
Against that front stand what a user would choose: blocks frozen by vote as they settle, with fresh draws or with two
views of each sample and the cache, and a prefix that is frozen from the start and cached.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from analysis.baseline import HELD_OUT, learning_rates
from analysis.sweeps.charts import in_time
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import COMPARED, FINAL_CUT, SAME_TIME, Results, best_lr
from analysis.sweeps.statistics import is_below
from analysis.sweeps.sweep import main
from hvfreeze.report.comparison import group_by_seed
from hvfreeze.report.tables import Table, phase_table

LARGER = 2
LEARNING_RATES = (0.01, 0.02, 0.05, 0.1)
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


def scaled(preset: Preset) -> tuple[int, dict[str, Value]]:
    """Return the epochs and the flags of every run; what counts is the accuracy after the last epoch."""
    epochs = max(2, round(EPOCHS * preset.epochs))
    return epochs, {"image_size": LARGER * preset.image_size, "epochs": epochs, "evaluate_every": epochs}


def runs(preset: Preset) -> list[PlannedRun]:
    """Return the runs that choose the learning rate."""
    held_out: dict[str, Value] = {**scaled(preset)[1], "validation_fraction": HELD_OUT}
    return [preset.run(f"lr{lr:g}", preset.lr_seeds[0], {**held_out, "lr": lr}) for lr in preset.few(LEARNING_RATES)]


def then(preset: Preset, results: Results) -> list[PlannedRun]:
    """Return the front and what stands against it; a seed's runs follow each other in time."""
    whole, common = scaled(preset)
    fewer = sorted({max(1, round(part * whole)) for part in preset.few(BUDGETS)})
    variants: dict[str, dict[str, Value]] = {f"epochs{epochs}": {"epochs": epochs} for epochs in fewer}
    variants |= {FULL: {}, **{label: {"blocks": preset.fine, **flags} for label, flags in VOTED.items()}, **STATIC}
    if preset.is_smoke:
        variants = {label: variants[label] for label in (f"epochs{fewer[0]}", FULL, "cut4-cached")}
    return preset.runs(variants, {**common, "lr": best_lr(results.rows) or preset.lr})


def frozen_labels(results: Results) -> list[str]:
    """Return the labels of frozen runs that have rows."""
    return [label for label in (*VOTED, *STATIC) if results.of(label)]


def answers(results: Results) -> list[Answer]:
    """Return what our default criterion gives, which was chosen beforehand, then all others."""
    labels = frozen_labels(results)
    if not labels or not results.of(FULL):
        return []
    first = results.of(FULL)[0]
    gain, ahead = results.gain(labels[0]), results.over_front(labels[0])
    text = (
        f"At {first['image_size']} pixels, by {results.shown_as(labels[0])}, training is "
        f"{results.gain_text(labels[0], count=True)} as fast, and in accuracy {results.lead_shown(labels[0])} full "
        "fine-tuning trained for as many seconds."
    )
    details = (
        (
            f"Full fine-tuning reaches {results.accuracy_text(FULL, count=True)} after {first['epochs']} epochs in "
            f"{results.time_text(FULL)}."
        ),
        *(
            f"{results.shown_as(label)}: speed-up {results.gain_text(label)}, change of accuracy "
            f"{results.change_text(label)}; against full fine-tuning trained for as many seconds "
            f"{results.lead_text(label)}."
            for label in labels
        ),
    )
    question = "Does it pay more with larger images and stronger weights?"
    negative = is_below(gain, 1) or is_below(ahead, 0)
    return [Answer(question, text, gain.n, negative=negative, details=details)]


def tables(results: Results) -> list[Table]:
    """Return the front and what stands against it, the choice of the learning rate, and seconds by phase."""
    rows = []
    for label in (label for label in results.labels if not label.startswith("lr")):
        ahead = results.lead_text(label) if label in frozen_labels(results) else ""
        rows.append((results.shown_as(label), *results.compared(label, FULL), ahead, results.cut_text(label)))
    tested = Table(columns=("Run", *COMPARED, SAME_TIME, FINAL_CUT), rows=tuple(rows))
    phases = phase_table(group_by_seed(results.runs_of(FULL, *frozen_labels(results))))
    return [tested, learning_rates(results), replace(phases, title="Seconds by phase")]


def drawings(results: Results) -> list[Drawing]:
    """Return accuracy against time."""
    labels = [FULL, *frozen_labels(results)]
    if len(labels) == 1 or not results.of(FULL):
        return []
    return [in_time(results, labels)]


LIMITS = (
    "Of the defaults below, image size, epochs and learning rate differ in all runs: twice, half, and chosen here.",
    "The learning rate was chosen for full fine-tuning, on one seed, and is the largest that was tried.",
    "The prefixes to freeze from the start were those of the caching experiment; no cut was searched for.",
    "The cache was allowed to the geometric criterion too and stored nothing: what differs there is the two views.",
    "CIFAR's images have 32 pixels and are enlarged: the work is that of larger images, the detail is not.",
)
EXPERIMENT = Experiment(
    "pixels64",
    "Larger images and stronger weights",
    runs,
    answers,
    tables,
    drawings,
    LIMITS,
    then=then,
    chooses_lr=True,
    reference=FULL,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
