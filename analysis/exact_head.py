"""Which features should a head that is solved exactly read, of how many views, and how finely must they be kept?

    python -m analysis.exact_head --preset reduced --data-dir DIR --weights FILE

All blocks frozen, one factor at a time changed from a linear head on every block's features at no more than 4 x 4
cells, of each image and its mirror image, in float32, images normalised as the weights were trained.
"""

from __future__ import annotations

import sys

from analysis.peers import NORMALISED
from analysis.sweeps.charts import bar_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import NOTHING, shown, signed_points, verdict
from analysis.sweeps.sweep import main
from hvfreeze.report.tables import Table, megabytes

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
FEATURES = tuple(VARIANTS)[:7]
"""Those that change what the head reads; behind the kernel, the others change how exactly it is computed."""
KERNEL, EXACTNESS = tuple(VARIANTS)[7], tuple(VARIANTS)[8:]


def slug(variant: str) -> str:
    """Return a variant as the name of its runs."""
    return variant.replace(" ", "-").replace("'", "")


def runs(preset: Preset) -> list[PlannedRun]:
    """Return every variant and what it is compared with; a seed's runs follow each other in time."""
    solved: dict[str, Value] = {"head": "multi-level", "head_fit": "exact", "augment": "none", "epochs": 1}
    variants = {slug(PLAIN): NORMALISED}
    for variant, flags in VARIANTS.items():
        variants[slug(variant)] = {**({} if variant == OWN_NORMALISATION else NORMALISED), **flags}
    if preset.is_smoke:
        variants = {slug(PLAIN): {}, "last-block-only": {"head": "last"}}
    return preset.runs(variants, {**solved, "checkpoint_every": "0"})


def tested(results: Results) -> list[str]:
    """Return the variants that have rows."""
    return [variant for variant in VARIANTS if results.of(slug(variant))]


def answers(results: Results) -> list[Answer]:
    """Return what each variant changes: of what the head reads, and of how exactly it is computed."""
    if not results.of(PLAIN):
        return []
    usual = (
        "Against a linear head on every block's features at no more than 4 x 4 cells, of image and mirror image, in "
        f"float32, which gives {results.accuracy_text(PLAIN, count=True)}:"
    )
    found = []
    for question, among, claim in (
        ("Which features should a solved head read?", FEATURES, of_features(results)),
        ("Must a solved head be linear?", (KERNEL,), of_kernel(results)),
        ("How exactly must a solved head's features be computed?", EXACTNESS, of_exactness(results)),
    ):
        chosen = [variant for variant in tested(results) if variant in among]
        told = tuple(f"{variant} {results.change_text(slug(variant))}" for variant in chosen)
        if told:
            found.append(Answer(question, claim, len(results.of(PLAIN)), details=(usual, *told)))
    return found


def of_features(results: Results) -> str:
    """Return what the plain features give, and whether others are shown to be better."""
    better = [each for each in tested(results) if each in FEATURES and results.change(slug(each)).low > 0]
    others = f"better: {', '.join(better)}" if better else "nothing else tried is shown to be better"
    level = results.accuracy_text(PLAIN, count=True)
    return f"Every block's, at no more than 4 x 4 cells, of image and mirror image, give {level}; {others}."


def of_kernel(results: Results) -> str:
    """Return what a head changes that is compared with every row."""
    changed = results.change_text(slug(KERNEL), count=True)
    return f"A head that compares with every row changes accuracy by {changed} against a linear one."


def of_exactness(results: Results) -> str:
    """Return what matters most of how exactly features are computed."""
    changes = {each: results.change(slug(each)) for each in tested(results) if each in EXACTNESS}
    most = max(changes, key=lambda each: abs(changes[each].mean), default="nothing")
    change = changes.get(most, NOTHING)
    return f"The most that anything tried changes is {shown(change, signed_points, count=True)}, by {most}."


def tables(results: Results) -> list[Table]:
    """Return every variant's accuracy, its difference, and the bytes that ranks exchange to solve the head."""
    columns = ("Instead", "Test accuracy", "Difference", "Shown", "Exchanged by a rank")
    rows = []
    for variant in [PLAIN, *tested(results)] if results.of(PLAIN) else tested(results):
        label = slug(variant)
        told = ("", "") if variant == PLAIN else (results.change_text(label), verdict(results.change(label)))
        sent = megabytes(results.mean(label, "allreduce_bytes").mean)
        rows.append((variant, results.accuracy_text(label, count=True), *told, sent))
    return [Table(columns=columns, rows=tuple(rows))]


def drawings(results: Results) -> list[Drawing]:
    """Return the differences as a figure."""
    gains = {variant: results.change(slug(variant)) for variant in tested(results)}
    if not gains:
        return []
    caption = f"Change of test accuracy, {results.spread([PLAIN])}."
    figure = bar_chart(gains, x="points of test accuracy", scale=100, from_zero=False)
    return [Drawing("differences", caption, figure)]


LIMITS = (
    "CIFAR-10 and one network that was trained on CIFAR-100: related images, a related task.",
    "One number of samples; with more of them, more features may pay.",
    "Accuracies only: variants differ in the work of their passes, and were not timed.",
)
EXPERIMENT = Experiment(
    "exact_head", "What a solved head reads", runs, answers, tables, drawings, LIMITS, chooses_lr=True, reference=PLAIN
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
