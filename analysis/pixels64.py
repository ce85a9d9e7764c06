"""Does freezing pay more where early blocks cost more? Images twice as large, from weights trained at that size.

    python -m analysis.pixels64 --preset reduced --data-dir DIR --weights FILE

The setting is the preset's but for the image size and the weights, and the experiment has its own baseline: the
learning rate is chosen on held-out training samples, and full fine-tuning is run for several numbers of epochs. Against
that front stand what a user would choose: blocks frozen by vote as they stabilize, with fresh draws or with two views
of each sample and the cache, and a prefix that is frozen from the start and cached.
"""

from __future__ import annotations

import sys

from analysis.baseline import HELD_OUT
from analysis.sweeps.charts import accuracy_time_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Metric, Results, best_lr
from analysis.sweeps.sweep import main

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


def words(results: Results) -> Words:
    frozen = [*VOTED, *STATIC]
    lead = Metric("Full, trained as long", lambda r, label, _: r.lead(label) if label in frozen else "")
    tested = {label: results.shown_as(label) for label in results.labels if not label.startswith("lr")}
    return {"frozen": frozen, "tested": tested, "lead_of_frozen": lead}


EXPERIMENT = Experiment(
    name="pixels64",
    runs=runs,
    then=then,
    words=words,
    drawings=lambda results: {"accuracy-time": accuracy_time_chart(results, [FULL, *VOTED, *STATIC])},
    chooses_lr=True,
    reference=FULL,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
