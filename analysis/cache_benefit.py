"""By how much does the cache pay, when, and when not? Whole commands with and without it, in turn.

    python -m analysis.cache_benefit --preset reduced --data-dir DIR --weights FOLDER/resnet18-cifar100-32px-fp16.pt

DIR has the folders `cifar` and `photographs` of `analysis.tasks`; FOLDER has resnet18-cifar100-64px-fp16.pt too. The
machine must be idle. First ten learning rates on one shared cache against the same ten without, in turn. Then a cut
that stays, and cuts that a schedule moves, for five times as many epochs as there are views. A pair of runs, with and
without the cache, has one seed; the next pair has the reverse order, so that four runs in a row are on, off, off, on.
`--seeds` counts these fours.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from analysis.sweeps.charts import OTHERS, Line, line_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.kept import KeptRuns
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import METRICS, Metric, Results
from analysis.sweeps.statistics import Interval, mean_interval, of_seeds, paired_ratio, shown
from analysis.sweeps.sweep import main
from analysis.tasks import written
from hvfreeze.report.figures import COLOURS
from hvfreeze.report.tables import Table, factor, percent, seconds

NAME = "cache_benefit"
WHOLE, TRAINING = "whole_seconds", "train_seconds"
ON, OFF, AUTO, SHARED, ALONE = "on", "off", "auto", "shared", "alone"
EPOCHS, STAGES = 10, 6
LARGER: dict[str, Value] = {"data_dir": "./photographs", "weights": "resnet18-cifar100-64px-fp16.pt", "batch_size": 32}
TASKS: dict[int, dict[str, Value]] = {
    32: {"data_dir": "./cifar", "train_samples": 2560},
    64: {**LARGER, "train_samples": 1024},
    128: {**LARGER, "train_samples": 512},
}
"""Image size -> what differs from the preset: CIFAR-10 at its own size, photographs of signed digits above it."""
CUTS = (4, 5)
LEARNING_RATES = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
FOURS, VOTED_FOURS = {128: 2}, 2
"""Largest number of fours of slow runs: by image size for fixed cuts, and for changing cuts."""
SMOKE_RATES = 2


@dataclass(frozen=True)
class Setting:
    """An image size with a fixed cut, or None for a changing one, to be run with and without the cache."""

    size: int
    cut: int | None

    @property
    def words(self) -> str:
        """The setting as a reader knows it."""
        frozen = f"{self.cut} of {STAGES} stages frozen" if self.cut else "voted cuts (geometric)"
        return f"{self.size} pixels, {frozen}"

    def label(self, way: str, lr: float | None = None) -> str:
        """Return the label of its runs, with `lr` of those of a sweep."""
        moved = f"cut{self.cut}" if self.cut else "voted"
        return f"px{self.size}-{moved}{'' if lr is None else f'-lr{lr:g}'}-{way}"

    def flags(self, preset: Preset, way: str) -> dict[str, Value]:
        """Return the flags of its runs, but for a sweep's learning rate."""
        task = {} if preset.is_smoke else {"data": "imagefolder", "image_size": self.size, **TASKS[self.size]}
        frozen: dict[str, Value] = {"freeze": "static", "cut": self.cut} if self.cut else {"freeze": "geometric"}
        flags: dict[str, Value] = {**task, **frozen, "augment": "views:2", "epochs": EPOCHS}
        flags |= {"evaluate_every": EPOCHS, "checkpoint_every": "0"}
        cache = {ON: "on", AUTO: "auto", SHARED: "on"}.get(way)
        if cache:
            flags["cache"] = cache
        if way == SHARED:
            flags["cache_dir"] = f"shared-px{self.size}-cut{self.cut}"
        return flags


STATIC = tuple(Setting(size, cut) for size in TASKS for cut in CUTS)
VOTED = Setting(64, None)
SWEPT = (Setting(128, 5), Setting(64, 4))
"""The sweeps over learning rates, the one in which most is expected first."""
PAIRS = (*((setting, ON) for setting in STATIC), (VOTED, ON), (VOTED, AUTO))
"""The settings and the ways of caching that stand against runs without."""


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


def gain(results: Results, setting: Setting, way: str = ON, column: str = WHOLE) -> Interval:
    """Return the time without the cache over that with it, paired by seed."""
    return results.ratio(setting.label(way), setting.label(OFF), column)


def plan_error(results: Results, setting: Setting, way: str = ON) -> Interval:
    """Return the predicted minus the measured seconds saved in training."""
    ours, theirs = (results.values(setting.label(each), TRAINING) for each in (way, OFF))
    predicted = results.values(setting.label(way), "cache_seconds_saved_predicted")
    shared = sorted(ours.keys() & theirs.keys() & predicted.keys())
    return of_seeds({seed: predicted[seed] - (theirs[seed] - ours[seed]) for seed in shared})


def same_bits(results: Results, ours: str, theirs: str) -> str:
    """Return of how many of two labels' runs, seed by seed, the models are equal bit for bit."""
    both = [{row["seed"]: row["parameter_digest"] for row in results.of(label)} for label in (ours, theirs)]
    equal = [both[0][seed] == both[1][seed] for seed in both[0].keys() & both[1].keys()]
    return f"{sum(equal)} of {len(equal)}"


class Sweep:
    """Learning rates tried one after another, with and without the shared cache; seconds of whole commands."""

    def __init__(self, results: Results, setting: Setting) -> None:
        self.results, self.setting = results, setting
        self.shared, self.alone = (
            [results.mean(setting.label(way, lr), WHOLE).mean for lr in LEARNING_RATES] for way in (SHARED, ALONE)
        )

    @property
    def gain(self) -> float:
        """All seconds without the cache over all with it."""
        return sum(self.alone) / sum(self.shared)

    @property
    def first_gain(self) -> float:
        """The speed-up of the first run, which fills the cache."""
        return self.alone[0] / self.shared[0]

    @property
    def later_gain(self) -> Interval:
        """The speed-up of the runs after the first, paired by learning rate."""
        ours, theirs = (dict(enumerate(seconds[1:])) for seconds in (self.shared, self.alone))
        return paired_ratio(theirs, ours)

    @property
    def equal(self) -> bool:
        """Whether all models are equal bit for bit."""
        pairs = (same_bits(self.results, *self.labels(lr)) for lr in LEARNING_RATES)
        return all(told == "1 of 1" for told in pairs)

    def labels(self, lr: float) -> tuple[str, str]:
        """Return the labels of the two runs with a learning rate."""
        return self.setting.label(SHARED, lr), self.setting.label(ALONE, lr)

    def table(self) -> str:
        """Return the commands."""
        rows: list[tuple[str, ...]] = []
        for place, lr in enumerate(LEARNING_RATES):
            (shared,), (alone,) = map(self.results.of, self.labels(lr))
            taken = (
                seconds(self.alone[place]),
                seconds(self.shared[place]),
                factor(self.alone[place] / self.shared[place]),
            )
            held = (str(shared["cache_rows_written"]), str(shared["cache_rows_read"]))
            accuracies = (percent(alone["test_accuracy"]), percent(shared["test_accuracy"]))
            bits = "yes" if shared["parameter_digest"] == alone["parameter_digest"] else "no"
            rows.append((f"{lr:g}", *taken, *held, *accuracies, bits))
        rows.append(("all", seconds(sum(self.alone)), seconds(sum(self.shared)), factor(self.gain), *[""] * 5))
        columns = ("Learning rate", "No cache", "Shared cache", "Speed-up", "Rows written", "Rows read")
        accuracy = ("Accuracy, no cache", "Accuracy, shared cache")
        return Table(columns=(*columns, *accuracy, "Same bits"), rows=tuple(rows)).to_text()


def signed_seconds(value: float) -> str:
    """Return a difference of seconds."""
    return f"{value:+.2f} s"


def columns() -> tuple[list[Metric], list[Metric]]:
    """Return the columns of the table of commands, and of that of plans; `against` is the label without the cache."""

    def spread(title: str, column: str, of_other: bool) -> Metric:
        return Metric(title, lambda r, label, _: shown(r.mean(other(label) if of_other else label, column), seconds))

    def other(label: str) -> str:
        return f"{label.rpartition('-')[0]}-{OFF}"

    def quicker(title: str, column: str, *, n: bool = False) -> Metric:
        return Metric(title, lambda r, label, _: shown(r.ratio(label, other(label), column), factor, count=n))

    commands = [
        spread("Command, no cache", WHOLE, True),
        spread("Command, cache", WHOLE, False),
        quicker("Speed-up", WHOLE, n=True),
        spread("Training, no cache", TRAINING, True),
        spread("Training, cache", TRAINING, False),
        quicker("Speed-up of it", TRAINING),
        METRICS["stored"],
        Metric("Same bits", lambda r, label, _: same_bits(r, label, other(label))),
    ]
    wrong = {setting.label(way): (setting, way) for setting, way in PAIRS}
    plans = [
        spread("Predicted", "cache_seconds_saved_predicted", False),
        spread("Saved, own account", "cache_seconds_saved", False),
        Metric("Saved by the clocks", lambda r, label, _: shown(r.difference(other(label), label, TRAINING), seconds)),
        Metric(
            "Predicted minus clocks",
            lambda r, label, _: shown(plan_error(r, *wrong[label]), signed_seconds, count=True),
        ),
    ]
    return commands, plans


def started(results: Results) -> str:
    """Return the flags of every setting's runs; those without a cache lack these flags alone."""
    lines, found = KeptRuns(results.directory).lines, dict[str, str]()
    for row in results.rows:
        if row["cache"] != "off":
            setting = str(row["label"]).partition("-lr")[0]
            found.setdefault(setting, written(lines[str(row["run"])]["flags"]))
    rows = tuple((setting, f"`{flags}`") for setting, flags in found.items())
    return Table(columns=("Runs", "Flags"), rows=rows, prose=frozenset({"Flags"})).to_text()


def words(results: Results) -> Words:
    def faster(setting: Setting, way: str = ON, *, n: bool = False) -> str:
        return shown(gain(results, setting, way), factor, count=n)

    commands, plans = columns()
    return {
        "sweeps": [Sweep(results, setting) for setting in SWEPT],
        "faster": faster,
        "by_gain": sorted(STATIC, key=lambda setting: -gain(results, setting).mean),
        "static": STATIC,
        "voted": VOTED,
        "pairs": PAIRS,
        "pair_labels": {setting.label(way): f"{setting.words}, `--cache {way}`" for setting, way in PAIRS},
        "commands": commands,
        "plans": plans,
        "plan_error": lambda setting, n=False: shown(plan_error(results, setting), signed_seconds, count=n),
        "clocks_saved": lambda setting: shown(
            results.difference(setting.label(OFF), setting.label(ON), TRAINING), seconds
        ),
        "worst_plan": max(STATIC, key=lambda setting: abs(plan_error(results, setting).mean)),
        "started": started(results),
    }


def drawings(results: Results) -> Mapping[str, Figure]:
    """Return a sweep's seconds as they add up, and the speed-up by image size."""
    taken = [
        Line(label=f"{words}, {sweep.setting.size} pixels", points=added_up(taken), colour=colour, dash=dash)
        for sweep, dash in zip((Sweep(results, setting) for setting in SWEPT), ("-", "--"))
        for words, taken, colour in (
            ("no cache", sweep.alone, COLOURS[0]),
            ("shared cache", sweep.shared, COLOURS[1]),
        )
    ]
    gains = [
        Line(
            label=f"{cut} of {STAGES} frozen, {words}",
            points={s.size: gain(results, s, column=column) for s in STATIC if s.cut == cut},
            colour=colour,
            dash=dash,
        )
        for cut, colour in zip(CUTS, OTHERS)
        for words, column, dash in (("command", WHOLE, "-"), ("training", TRAINING, "--"))
    ]
    return {
        "learning-rates": line_chart(taken, x="learning rates tried", y="seconds of all commands so far"),
        "speed-up": line_chart(gains, x="image size (pixels)", y="speed-up by the cache", log_x=True),
    }


def added_up(taken: Iterable[float]) -> dict[int, Interval]:
    """Return how much the first 1, 2, ... come to."""
    return {count: mean_interval([total]) for count, total in enumerate(itertools.accumulate(taken), 1)}


EXPERIMENT = Experiment(name=NAME, runs=runs, words=words, drawings=drawings, one_factor=False)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
