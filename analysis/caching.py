"""What does caching the frozen prefix's output save? (Left open by the study.)

    python -m analysis.caching --preset reduced --data-dir DIR --weights FILE

Default: four of the six stages frozen statically, two views of each sample, the cache on, stored as computed. Changed
one at a time: the cache, the cut, the number of views (and fresh draws, which cannot be cached), the stored type, the
image size (phase times of a few steps). Last, what users run: a voted prefix with `--cache auto`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from analysis.parts.cached_epochs import by_account, epochs_chart, saved_by_clocks
from analysis.sweeps import paper
from analysis.sweeps.charts import Line, in_time, line_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import SAME_TIME, Results
from analysis.sweeps.statistics import is_below, shown, time_saved
from analysis.sweeps.sweep import main
from hvfreeze.report.comparison import group_by_seed
from hvfreeze.report.figures import COLOURS
from hvfreeze.report.tables import Table, factor, megabytes, percent, phase_table, seconds

CUT = 4
CUTS = (3, 4, 5)
ON, OFF = "cut4-on", "cut4-off"
VIEW_LABELS = {"1": "views1", "2": ON, "4": "views4", "8": "views8", "fresh, not cached": "fresh"}
STORED_LABELS = ("float16", "bfloat16")
MORE_SEEDS = 2
"""For float16 beside the native type, whose difference is to be known to a fraction of a point."""
SIZES = (32, 64, 224)
STUDY_GROUPS = {3: 4, 4: 5, 5: 6}
"""Cut of the stages -> frozen groups of the study's split."""
BASE: dict[str, Value] = {"augment": "views:2", "freeze": "static", "cut": CUT}


def variants() -> dict[str, dict[str, Value]]:
    """Return the flags of every variant with full-length runs, by label."""
    found: dict[str, dict[str, Value]] = {"full": {}}
    for cut in CUTS:
        for cache in ("off", "on"):
            found[f"cut{cut}-{cache}"] = {**BASE, "cut": cut, "cache": cache}
    found["fresh"] = {**BASE, "augment": "fresh"}
    for views in (1, 4, 8):
        found[f"views{views}"] = {**BASE, "augment": f"views:{views}", "cache": "on"}
    for dtype in STORED_LABELS:
        found[dtype] = {**BASE, "cache": "on", "cache_dtype": dtype}
    voted: dict[str, Value] = {"augment": "views:2", "freeze": "percentile", "eta_max": 1.0}
    found["voted"], found["voted-auto"] = voted, {**voted, "cache": "auto"}
    return found


def runs(preset: Preset) -> list[PlannedRun]:
    """Return all variants; a seed's runs follow each other in time. The phase times have one seed."""
    chosen = variants()
    if preset.is_smoke:
        return preset.runs({label: chosen[label] for label in (OFF, ON)}, {})
    planned, more = preset.runs(chosen, {}), max(preset.seeds) + 1
    for seed in range(more, more + MORE_SEEDS):
        planned += [preset.run(label, seed, chosen[label]) for label in (ON, "float16")]
    few: dict[str, Value] = {"batch_size": 32, "epochs": 4, "train_samples": 512, "validation_fraction": 0.1}
    short: dict[str, Value] = {**BASE, **few, "augment": "none", "checkpoint_every": "0"}
    for size in SIZES:
        for cache in ("off", "on"):
            flags = {**short, "cache": cache, "image_size": size}
            planned.append(preset.run(f"size{size}-{cache}", preset.seeds[0], flags))
    return planned


def answers(results: Results) -> list[Answer]:
    """Return the answer to question 5."""
    gain, ahead = results.gain(ON, OFF), results.over_front(ON)
    if gain.n == 0:
        return []
    study, deepest = STUDY_GROUPS[CUT], f"cut{CUTS[-1]}-on"
    ideal = paper.CACHED_SPEED_UP[study] / paper.SPEED_UP[study]
    text = (
        f"With {CUT} of 6 stages frozen and two views a sample, the cache's speed-up is "
        f"{results.gain_text(ON, OFF, count=True)}."
    )
    details = [
        (
            f"That is {shown(time_saved(gain), percent)} less time; on the study's timings a perfect cache would give "
            f"{factor(ideal)}."
        ),
        (
            f"The clocks say that {shown(saved_by_clocks(results, ON), seconds)} were saved, the program's own account "
            f"{shown(by_account(results, ON), seconds, count=True)}."
        ),
    ]
    if results.gain(ON).n:
        details.append(f"Freezing and cache together: {results.gain_text(ON)} over full fine-tuning.")
    if results.change(ON, "fresh").n:
        changed = results.change_text(ON, "fresh")
        details.append(f"Two views instead of fresh draws change accuracy by {changed}.")
    if ahead.n:
        details.append(f"Against full fine-tuning trained for as many seconds: {results.lead_text(ON)}.")
    if results.gain(deepest).n:
        deeper = f"{results.gain_text(deepest)}, and {results.lead_text(deepest)}"
        details.append(f"With {CUTS[-1]} stages frozen and cached: {deeper}.")
    negative = is_below(gain, 1) or is_below(ahead, 0)
    question = "5. What does caching the frozen prefix's output save?"
    return [Answer(question, text, gain.n, negative=negative, details=tuple(details))]


def long_labels(results: Results) -> list[str]:
    """Return the labels of full-length runs."""
    return [label for label in results.labels if not label.startswith("size")]


def tables(results: Results) -> list[Table]:
    """Return a row per variant, and the phases by image size."""
    columns = ("Variant", "Training time", "Speed-up", "Test accuracy", "Against full", SAME_TIME, "Stored")
    more = ("Saved by the clocks", "Saved, own account", "Predicted", "Exact")
    found = [
        Table(columns=(*columns, *more), rows=tuple(cells(results, label) for label in long_labels(results))),
        compared(results, {name: name for name in STORED_LABELS}, ON, title="Stored type against the computed one"),
        compared(results, VIEW_LABELS, "fresh", title="Fixed views of a sample against fresh draws"),
    ]
    short = [label for label in results.labels if label.startswith("size")]
    if short:
        phases = phase_table(group_by_seed(results.runs_of(*short)))
        found.append(replace(phases, title="Seconds by phase and image size, a few steps"))
    return found


def cells(results: Results, label: str) -> tuple[str, ...]:
    """Return a variant's row; what a cache gave is shown of the runs that stored something."""
    saved, predicted = (
        by_account(results, label, column) for column in ("cache_seconds_saved", "cache_seconds_saved_predicted")
    )
    clocks = saved_by_clocks(results, label)
    exact = {row["cache_exact"] for row in results.of(label) if row["cache_bytes"]}
    return (
        results.shown_as(label),
        results.time_text(label),
        results.gain_text(label, "full"),
        results.accuracy_text(label),
        results.change_text(label, "full"),
        results.lead_text(label),
        shown(results.mean(label, "cache_bytes"), megabytes),
        shown(clocks, seconds) if clocks.n and saved.n else "",
        shown(saved, seconds) if saved.n else "",
        shown(predicted, seconds) if predicted.n else "",
        "" if not exact else "yes" if exact == {True} else "no",
    )


def compared(results: Results, labels: Mapping[str, str], reference: str, *, title: str) -> Table:
    """Return accuracy and its difference from a reference, paired by seed."""
    rows = [
        (
            name,
            results.accuracy_text(label, count=True),
            results.change_text(label, reference, count=True),
            shown(results.mean(label, "cache_bytes"), megabytes),
        )
        for name, label in labels.items()
        if results.of(label)
    ]
    return Table(title=title, columns=("Variant", "Test accuracy", f"Against {reference}", "Stored"), rows=tuple(rows))


def drawings(results: Results) -> list[Drawing]:
    """Return epochs, speed-ups by cut, and accuracy against time."""
    labels, found = long_labels(results), []
    if not labels:
        return []
    if results.of(ON) and results.of(OFF):
        caption = (
            f"An epoch's training time with {CUT} of 6 stages frozen and two views a sample: the first two epochs fill "
            f"the cache, the others read it; without checkpoints; mean and 95 % interval, "
            f"n = {len(results.of(OFF))} seeds without and {len(results.of(ON))} with the cache."
        )
        found.append(Drawing("epochs", caption, epochs_chart(results, ON, OFF)))
    if results.of("full"):
        known = [cut for cut in CUTS if results.of(f"cut{cut}-on")]
        lines = [
            Line(
                label=f"cache {cache}",
                points={cut: results.gain(f"cut{cut}-{cache}", "full") for cut in known},
                colour=COLOURS[place],
            )
            for place, cache in enumerate(("off", "on"))
        ]
        figure = line_chart(lines, x="frozen stages (of 6)", y="speed-up over full fine-tuning")
        caption = f"Speed-up by cut, two views; {results.spread(['full'])}."
        found.append(Drawing("speed-up", caption, figure))
    return [*found, in_time(results, labels)]


LIMITS = (
    "Files lie on the local disk and mostly in the page cache; a network file system is another case.",
    "Phase times by image size are of a few steps and have no repetition.",
    "A full run draws fresh views; a cached run has its fixed views, as its users would have.",
)
EXPERIMENT = Experiment(
    "caching", "Caching the frozen prefix's output", runs, answers, tables, drawings, LIMITS, reference="full", shown=3
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
