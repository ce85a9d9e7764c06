"""Which features should a fitted linear head read, of how many views, and at which precision?

    python -m analysis.exact_head --preset reduced --data-dir DIR --weights FILE

All blocks frozen, one factor at a time changed from a linear head on every block's features at no more than 4 x 4
cells, of each image and its horizontal flip, in float32, images normalised as the weights were trained.
"""

from __future__ import annotations

import sys

from analysis.peers import NORMALISED
from analysis.sweeps.charts import bar_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Metric, Results
from analysis.sweeps.statistics import verdict
from analysis.sweeps.sweep import main

PLAIN, OWN_NORMALISATION = "plain", "the data's normalisation"
VARIANTS: dict[str, dict[str, Value]] = {
    "last block only": {"head": "last"},
    "1 cell": {"pool": 1},
    "2 x 2 cells": {"pool": 2},
    "8 x 8 cells": {"pool": 8},
    "residual blocks": {"blocks": "residual"},
    "four views": {"augment": "views:4"},
    "eight views": {"augment": "views:8"},
    "compared with every row": {"head_fit": "kernel"},
    "bfloat16": {"precision": "bfloat16"},
    "rows in float16": {"cache": "on", "cache_dtype": "float16"},
    OWN_NORMALISATION: {},
}
"""Variants by their name for readers -> their flags."""
LABELS = {variant.replace(" ", "-").replace("'", ""): variant for variant in VARIANTS}
FEATURES, KERNEL, EXACTNESS = tuple(LABELS)[:7], tuple(LABELS)[7], tuple(LABELS)[8:]
"""Variants of the head's input; those behind the kernel change how exactly it is computed."""


def runs(preset: Preset) -> list[PlannedRun]:
    """Return every variant and what it is compared with; a seed's runs follow each other in time."""
    solved: dict[str, Value] = {"head": "multi-level", "head_fit": "exact", "augment": "none", "epochs": 1}
    variants = {PLAIN: NORMALISED}
    for label, variant in LABELS.items():
        variants[label] = {**({} if variant == OWN_NORMALISATION else NORMALISED), **VARIANTS[variant]}
    if preset.is_smoke:
        variants = {PLAIN: {}, "last-block-only": {"head": "last"}}
    return preset.runs(variants, {**solved, "checkpoint_every": "0"})


def words(results: Results) -> Words:
    return {
        "variants": LABELS,
        "with_plain": {PLAIN: PLAIN, **LABELS},
        "features": FEATURES,
        "kernel": KERNEL,
        "exactness": EXACTNESS,
        "columns": [
            Metric("Difference", lambda r, label, _: "" if label == PLAIN else r.change(label)),
            Metric("Shown", lambda r, label, _: "" if label == PLAIN else verdict(r.difference(label))),
        ],
    }


EXPERIMENT = Experiment(
    name="exact_head",
    runs=runs,
    words=words,
    drawings=lambda results: {
        "differences": bar_chart(
            {variant: results.difference(label) for label, variant in LABELS.items()},
            x="points of test accuracy",
            scale=100,
            from_zero=False,
        )
    },
    chooses_lr=True,
    reference=PLAIN,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
