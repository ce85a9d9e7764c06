"""By how much does the cache pay, when, and when not? Whole commands with and without it, in turn.

    python -m analysis.cache_reads
    python -m analysis.cache_benefit --preset reduced --data-dir DIR --weights FOLDER/resnet18-cifar100-32px-fp16.pt

DIR has the folders `cifar` and `photographs` of `analysis.grounds`; FOLDER has resnet18-cifar100-64px-fp16.pt too. The
machine must be idle. First ten learning rates on one shared cache against the same ten without, in turn. Then a cut
that stays, and cuts that a schedule moves, for five times as many epochs as there are views. A pair of runs, with and
without the cache, has one seed; the next pair has the reverse order, so that four runs in a row are on, off, off, on.
`--seeds` counts these fours. The first command, which may be left out, times reads alone; its rows stand here too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from analysis.grounds import written
from analysis.parts.cached_commands import (
    ALONE,
    AUTO,
    CUTS,
    EPOCHS,
    LEARNING_RATES,
    NAME,
    OFF,
    ON,
    SHARED,
    STAGES,
    STATIC,
    SWEPT,
    TRAINING,
    VOTED,
    WHOLE,
    Setting,
    Sweep,
    answers,
    gain,
    pairs_of,
    plan_error,
    same_bits,
    signed_seconds,
    sweeps,
    timed,
)
from analysis.parts.read_tables import Reads
from analysis.sweeps.charts import OTHERS, Line, line_chart
from analysis.sweeps.experiment import Drawing, Experiment
from analysis.sweeps.kept import KeptRuns
from analysis.sweeps.presets import PlannedRun, Preset
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, mean_interval, shown
from analysis.sweeps.sweep import main
from hvfreeze.report.figures import COLOURS
from hvfreeze.report.tables import Table, factor, megabytes, percent, seconds

FOURS, VOTED_FOURS = {128: 2}, 2
"""Fours of runs at most, where they take long: image size -> for cuts that stay, and for those that move."""
SMOKE_RATES = 2


def runs(preset: Preset) -> list[PlannedRun]:
    """Return the sweeps, then pairs in turn, setting by setting."""
    planned, static = [], STATIC[-2:-1] if preset.is_smoke else STATIC
    for setting in SWEPT[:1] if preset.is_smoke else SWEPT:
        for place, lr in enumerate(LEARNING_RATES[:SMOKE_RATES] if preset.is_smoke else LEARNING_RATES):
            for way in in_turn((SHARED, ALONE), place):
                flags = {**setting.flags(preset, way), "lr": lr}
                planned.append(preset.run(setting.label(way, lr), 0, flags))
    for four, seed in enumerate(preset.seeds):
        for setting in static:
            if four < FOURS.get(setting.size, len(preset.seeds)):
                planned += fours(preset, setting, (ON, OFF), seed)
        if four < VOTED_FOURS:
            planned += fours(preset, VOTED, (OFF, ON, AUTO), seed)
    return planned


def fours(preset: Preset, setting: Setting, ways: Sequence[str], number: int) -> list[PlannedRun]:
    """Return the ways of a setting twice, with two seeds, the second time in the reverse order."""
    return [
        preset.run(setting.label(way), seed, setting.flags(preset, way))
        for seed in (2 * number, 2 * number + 1)
        for way in in_turn(ways, seed)
    ]


def in_turn(ways: Sequence[str], place: int) -> Sequence[str]:
    """Return the ways in this order at even places, in the reverse order at odd ones."""
    return ways if place % 2 == 0 else ways[::-1]


def tables(results: Results) -> list[Table]:
    """Return sweeps, whole commands, what the plan said, reads, and the flags of the runs."""
    found = [each_rate(results, sweep) for sweep in sweeps(results)]
    found += [table for table in (commands(results), planned_beside_saved(results)) if table.rows]
    reads = Reads.of(results.directory)
    return [*found, *([reads.table()] if reads.rows else []), started(results)]


def each_rate(results: Results, sweep: Sweep) -> Table:
    """Return the commands of a sweep."""
    rows = []
    for place, lr in enumerate(sweep.rates):
        shared, alone = (results.of(label)[0] for label in sweep.pairs()[place])
        rows.append(
            (
                f"{lr:g}",
                seconds(sweep.alone[place]),
                seconds(sweep.shared[place]),
                factor(sweep.alone[place] / sweep.shared[place]),
                str(shared["cache_rows_written"]),
                str(shared["cache_rows_read"]),
                percent(alone["test_accuracy"]),
                percent(shared["test_accuracy"]),
                "yes" if shared["parameter_digest"] == alone["parameter_digest"] else "no",
            )
        )
    total = ("all", seconds(sum(sweep.alone)), seconds(sum(sweep.shared)), factor(sweep.gain), "", "", "", "", "")
    columns = ("Learning rate", "No cache", "Shared cache", "Speed-up", "Rows written", "Rows read")
    accuracy = ("Accuracy, no cache", "Accuracy, shared cache")
    title = f"Whole commands of a sweep on one shared cache, {sweep.setting.words}"
    return Table(title=title, columns=(*columns, *accuracy, "Same bits"), rows=(*rows, total))


def commands(results: Results) -> Table:
    """Return whole command and training of every setting."""
    rows = []
    for setting, way in pairs_of(results):
        on, off = setting.label(way), setting.label(OFF)
        equal, unequal = same_bits(results, [(on, off)])
        rows.append(
            (
                f"{setting.words}, `--cache {way}`",
                *(shown(results.mean(label, WHOLE), seconds) for label in (off, on)),
                shown(gain(results, setting, way), factor, count=True),
                *(shown(results.mean(label, TRAINING), seconds) for label in (off, on)),
                shown(gain(results, setting, way, TRAINING), factor),
                shown(results.mean(on, "cache_bytes"), megabytes),
                f"{equal} of {equal + unequal}",
            )
        )
    columns = ("Setting", "Command, no cache", "Command, cache", "Speed-up", "Training, no cache", "Training, cache")
    title = f"One run of {EPOCHS} epochs and two views, pairs in turn"
    return Table(title=title, columns=(*columns, "Speed-up of it", "Stored", "Same bits"), rows=tuple(rows))


def planned_beside_saved(results: Results) -> Table:
    """Return what the plan said, beside the program's own account and the clocks."""
    rows = []
    for setting, way in pairs_of(results):
        on, off = setting.label(way), setting.label(OFF)
        told = ("cache_seconds_saved_predicted", "cache_seconds_saved")
        rows.append(
            (
                f"{setting.words}, `--cache {way}`",
                *(shown(results.mean(on, column), seconds) for column in told),
                shown(results.change(off, on, TRAINING), seconds),
                shown(plan_error(results, setting, way), signed_seconds, count=True),
            )
        )
    columns = ("Setting", "Predicted", "Saved, own account", "Saved by the clocks", "Predicted minus clocks")
    return Table(title="What the plan said, seconds of training", columns=columns, rows=tuple(rows))


def drawings(results: Results) -> list[Drawing]:
    """Return a sweep's seconds as they add up, and the speed-up by image size."""
    found, known = [], sweeps(results)
    if known:
        lines = [
            Line(label=f"{words}, {sweep.setting.size} pixels", points=added_up(taken), colour=colour, dash=dash)
            for sweep, dash in zip(known, ("-", "--"))
            for words, taken, colour in (
                ("no cache", sweep.alone, COLOURS[0]),
                ("shared cache", sweep.shared, COLOURS[1]),
            )
        ]
        caption = (
            "Seconds of whole commands as learning rates are tried one after another; one run each, sizes on different "
            f"days; {'; '.join(sweep.setting.words for sweep in known)}."
        )
        figure = line_chart(lines, x="learning rates tried", y="seconds of all commands so far")
        found.append(Drawing("learning-rates", caption, figure))
    settings = timed(results)
    if settings:
        lines = [
            Line(
                label=f"{cut} of {STAGES} frozen, {words}",
                points={s.size: gain(results, s, column=column) for s in settings if s.cut == cut},
                colour=colour,
                dash=dash,
            )
            for cut, colour in zip(CUTS, OTHERS)
            if any(s.cut == cut for s in settings)
            for words, column, dash in (("command", WHOLE, "-"), ("training", TRAINING, "--"))
        ]
        caption = (
            f"Speed-up by the cache in one run of {EPOCHS} epochs and two views, by stages that are frozen: of the "
            "whole command, and of training alone; "
            f"{results.spread([setting.label(ON) for setting in settings])}."
        )
        figure = line_chart(lines, x="image size (pixels)", y="speed-up by the cache", log_x=True)
        found.append(Drawing("speed-up", caption, figure))
    return found


def started(results: Results) -> Table:
    """Return the flags of every setting's runs; those without a cache lack these flags alone."""
    lines, found = KeptRuns(results.directory).lines, dict[str, str]()
    for row in results.rows:
        if row["cache"] != "off":
            setting = str(row["label"]).partition("-lr")[0]
            found.setdefault(setting, written(lines[str(row["run"])]["flags"]))
    rows = tuple((setting, f"`{flags}`") for setting, flags in found.items())
    title = "How runs are started, here with the cache (of a sweep the first learning rate); paths below DIR and FOLDER"
    return Table(title=title, columns=("Runs", "Flags"), rows=rows, prose=frozenset({"Flags"}))


def added_up(taken: Sequence[float]) -> dict[int, Interval]:
    """Return how much the first 1, 2, ... come to."""
    return {count: mean_interval([total]) for count, total in enumerate(itertools.accumulate(taken), 1)}


LIMITS = (
    "One machine with 2 cores and a local disk; a network file system is another case.",
    "Files that a run has just written lie in the page cache, as they would for its user.",
    "At 32 pixels CIFAR-10, above it photographs of signed digits: data and size change together.",
    "A sweep was made once; its interval is over the learning rates after the first.",
    "A whole command starts Python and MPI, reads images, trains, evaluates once at the end and writes the model.",
    "A run verifies a file when it opens it, which reads all of it once; reads here are timed after that.",
    "Before cold reads pages are unmapped, written back (fsync) and dropped (posix_fadvise); a virtual disk may cache.",
)
EXPERIMENT = Experiment(
    NAME,
    "By how much the activation cache pays",
    runs,
    answers,
    tables,
    drawings,
    LIMITS,
    shown=6,
    one_factor=False,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
