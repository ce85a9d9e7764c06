"""Which features should a head that is solved exactly read, of how many views, and how finely must they be kept?

    python -m analysis.exact_head --preset reduced --data-dir DIR --weights FILE

All blocks frozen, one factor at a time changed from a linear head on every block's features at no more than 4 x 4
cells, of each image and its mirror image, in float32, images normalised as the weights were trained.
"""

from __future__ import annotations

import sys

from analysis.peers import NORMALISED
from analysis.sweeps.experiment import main
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.questions import Answer, Drawing, Experiment
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, is_below, shown, signed_points
from analysis.writing.charts import bar_chart
from hvfreeze.report.tables import Table
from hvfreeze.report.units import megabytes, percent

PLAIN = "plain"
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
    "the data's normalisation": {},
}
FEATURES = tuple(VARIANTS)[:7]
"""Those that change what the head reads; behind the kernel, the others change how exactly it is computed."""
KERNEL = tuple(VARIANTS)[7]


def slug(variant: str) -> str:
    """Return a variant as the name of its runs."""
    return variant.replace(" ", "-").replace("'", "")


def runs(preset: Preset) -> list[PlannedRun]:
    """Return every variant and what it is compared with; a seed's runs follow each other in time."""
    common: dict[str, Value] = {
        "head": "multi-level",
        "head_fit": "exact",
        "augment": "none",
        "epochs": 1,
        "checkpoint_every": "0",
    }
    chosen = ("last block only",) if preset.is_smoke else tuple(VARIANTS)
    planned = []
    for seed in preset.seeds:
        for variant in (PLAIN, *chosen):
            usual = {} if preset.is_smoke or variant == "the data's normalisation" else NORMALISED
            flags = {**common, **usual, **VARIANTS.get(variant, {})}
            planned.append(preset.run(slug(variant), seed, flags))
    return planned


def tested(results: Results) -> list[str]:
    """Return the variants that have rows."""
    return [variant for variant in VARIANTS if results.of(slug(variant))]


def gained(results: Results, variant: str) -> Interval:
    """Return the change of accuracy, paired by seed."""
    return results.change(slug(variant), PLAIN)


def verdict(gain: Interval) -> str:
    """Return what a change of accuracy shows."""
    if is_below(gain, 0):
        return "worse (negative)"
    return "better" if gain.low > 0 else "no difference shown"


def answers(results: Results) -> list[Answer]:
    """Return what each variant changes: of what the head reads, and of how exactly it is computed."""
    if not results.of(PLAIN):
        return []
    level, found = results.mean(PLAIN, "test_accuracy"), []
    for question, among in (
        ("Which features should a solved head read?", FEATURES),
        ("Must a solved head be linear?", (KERNEL,)),
        ("How exactly must a solved head's features be computed?", tuple(VARIANTS)[len(FEATURES) + 1 :]),
    ):
        gains = {variant: gained(results, variant) for variant in tested(results) if variant in among}
        told = "; ".join(f"{variant} {shown(gain, signed_points)}" for variant, gain in gains.items())
        text = (
            "A linear one on those of every block at no more than 4 x 4 cells, of image and mirror image, in float32, "
            f"gives {shown(level, percent, count=True)}. Instead: {told or 'nothing yet'}."
        )
        found.append(Answer(question=question, text=text, n=level.n))
    return found


def tables(results: Results) -> list[Table]:
    """Return every variant's accuracy, its difference, and the bytes that ranks exchange to solve the head."""
    columns = ("Instead", "Test accuracy", "Difference", "Shown", "Exchanged by a rank")
    rows = []
    for variant in (PLAIN, *tested(results)):
        label = slug(variant)
        if results.of(label):
            gain = gained(results, variant) if variant != PLAIN else None
            told = ("", "") if gain is None else (shown(gain, signed_points), verdict(gain))
            accuracy = shown(results.mean(label, "test_accuracy"), percent, count=True)
            rows.append((variant, accuracy, *told, megabytes(results.mean(label, "allreduce_bytes").mean)))
    return [Table(columns=columns, rows=tuple(rows))]


def drawings(results: Results) -> list[Drawing]:
    """Return the differences as a figure."""
    gains = {variant: gained(results, variant) for variant in tested(results)}
    if not gains:
        return []
    caption = f"Change of test accuracy, mean and 95 % interval, {results.count([PLAIN])}."
    figure = bar_chart(gains, x="points of test accuracy", scale=100, from_zero=False)
    return [Drawing(name="differences", caption=caption, figure=figure)]


EXPERIMENT = Experiment(
    name="exact_head",
    title="What a solved head reads",
    runs=runs,
    answers=answers,
    tables=tables,
    drawings=drawings,
    chooses_lr=True,
    reference=PLAIN,
    limits=(
        "CIFAR-10 and one network that was trained on CIFAR-100: related images, a related task.",
        "One number of samples; with more of them, more features may pay.",
        "Accuracies only: variants differ in the work of their passes, and were not timed.",
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
