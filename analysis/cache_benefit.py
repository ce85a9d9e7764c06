"""By how much does the cache pay, when, and when not? Whole commands with and without it, in turn.

    python -m analysis.cache_reads
    python -m analysis.cache_benefit --preset reduced --data-dir DIR --weights FOLDER/resnet18-cifar100-32px-fp16.pt

DIR has the folders `cifar` and `photographs` of `analysis.grounds`; FOLDER has resnet18-cifar100-64px-fp16.pt too. The
machine must be idle. A cut that stays, and cuts that a schedule moves, for five times as many epochs as there are
views. A pair of runs, with and without the cache, has one seed; the next pair has the reverse order, so that four runs
in a row are on, off, off, on. `--seeds` counts these fours. Last, ten learning rates on one shared cache against the
same ten without, again in turn. The first command, which may be left out, times reads alone; its rows stand here too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from analysis.sweeps.charts import Line, line_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.kept import texts_of
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, is_below, mean_interval, of_seeds, paired_ratio, shown
from analysis.sweeps.sweep import main
from hvfreeze.report.figures import COLOURS
from hvfreeze.report.tables import Table, factor, megabytes, percent, seconds

NAME, READS = "cache_benefit", "reads.csv"
WHOLE, TRAINING = "whole_seconds", "train_seconds"
ON, OFF, AUTO, SHARED, ALONE = "on", "off", "auto", "shared", "alone"
EPOCHS, STAGES = 10, 6
LARGER: dict[str, Value] = {"data_dir": "./photographs", "weights": "resnet18-cifar100-64px-fp16.pt", "batch_size": 32}
GROUNDS: dict[int, dict[str, Value]] = {
    32: {"data_dir": "./cifar", "train_samples": 2560},
    64: {**LARGER, "train_samples": 1024},
    128: {**LARGER, "train_samples": 512},
}
"""Image size -> what differs from the preset: CIFAR-10 at its own size, photographs of signed digits above it."""
FOURS = {128: 2}
"""Image size -> fours of runs at most, where they take long."""
CUTS = (4, 5)
VOTED_SIZE, VOTED_FOURS = 64, 2
SWEEPS = ((128, 5), (64, 4))
"""Image size and cut of the sweeps over learning rates, the one in which most is expected first."""
LEARNING_RATES = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
SMOKE_RATES = 2


@dataclass(frozen=True)
class Setting:
    """What is run with and without the cache: an image size, and a cut that stays, or None for one that moves."""

    size: int
    cut: int | None

    @property
    def words(self) -> str:
        """The setting as a reader knows it."""
        frozen = f"{self.cut} of {STAGES} stages frozen" if self.cut else "stages frozen one by one (geometric)"
        return f"{self.size} pixels, {frozen}"

    def label(self, way: str, lr: float | None = None) -> str:
        """Return the label of its runs, with `lr` of those of a sweep."""
        moved = f"cut{self.cut}" if self.cut else "voted"
        return f"px{self.size}-{moved}{'' if lr is None else f'-lr{lr:g}'}-{way}"

    def flags(self, preset: Preset, way: str) -> dict[str, Value]:
        """Return the flags of its runs, but for a sweep's learning rate."""
        ground = {} if preset.is_smoke else {"data": "imagefolder", "image_size": self.size, **GROUNDS[self.size]}
        frozen: dict[str, Value] = {"freeze": "static", "cut": self.cut} if self.cut else {"freeze": "geometric"}
        flags: dict[str, Value] = {**ground, **frozen, "augment": "views:2", "epochs": EPOCHS}
        flags |= {"evaluate_every": EPOCHS, "checkpoint_every": "0"}
        cache = {ON: "on", AUTO: "auto", SHARED: "on"}.get(way)
        if cache:
            flags["cache"] = cache
        if way == SHARED:
            flags["cache_dir"] = f"shared-px{self.size}-cut{self.cut}"
        return flags


STATIC = tuple(Setting(size, cut) for size in GROUNDS for cut in CUTS)
VOTED = Setting(VOTED_SIZE, None)
SWEPT = tuple(Setting(*each) for each in SWEEPS)


def runs(preset: Preset) -> list[PlannedRun]:
    """Return pairs in turn, setting by setting, then the sweeps."""
    planned, static = [], STATIC[-2:-1] if preset.is_smoke else STATIC
    for four, seed in enumerate(preset.seeds):
        for setting in static:
            if four < FOURS.get(setting.size, len(preset.seeds)):
                planned += fours(preset, setting, (ON, OFF), seed)
        if four < VOTED_FOURS:
            planned += fours(preset, VOTED, (OFF, ON, AUTO), seed)
    for setting in SWEPT[:1] if preset.is_smoke else SWEPT:
        for place, lr in enumerate(LEARNING_RATES[:SMOKE_RATES] if preset.is_smoke else LEARNING_RATES):
            for way in in_turn((SHARED, ALONE), place):
                flags = {**setting.flags(preset, way), "lr": lr}
                planned.append(preset.run(setting.label(way, lr), 0, flags))
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
    return results.gain(setting.label(way), setting.label(OFF), column)


def timed(results: Results, settings: Iterable[Setting] = STATIC, way: str = ON) -> list[Setting]:
    """Return the settings of which there is a pair."""
    return [setting for setting in settings if gain(results, setting, way).n]


def plan_error(results: Results, setting: Setting, way: str = ON) -> Interval:
    """Return the seconds that the plan promised beyond those that the clocks of training say were saved."""
    ours, theirs = (results.values(setting.label(each), TRAINING) for each in (way, OFF))
    predicted = results.values(setting.label(way), "cache_seconds_saved_predicted")
    shared = sorted(ours.keys() & theirs.keys() & predicted.keys())
    return of_seeds({seed: predicted[seed] - (theirs[seed] - ours[seed]) for seed in shared})


def same_bits(results: Results, pairs: Iterable[tuple[str, str]]) -> tuple[int, int]:
    """Return of how many pairs of labels' runs, seed by seed, the models are equal bit for bit, and of how many not."""
    equal = []
    for pair in pairs:
        ours, theirs = ({row["seed"]: row["parameter_digest"] for row in results.of(label)} for label in pair)
        equal += [ours[seed] == theirs[seed] for seed in ours.keys() & theirs.keys()]
    return sum(equal), len(equal) - sum(equal)


@dataclass(frozen=True)
class Sweep:
    """Learning rates tried one after another, with and without the shared cache; seconds of whole commands."""

    setting: Setting
    rates: tuple[float, ...]
    """Of which there are both runs."""
    shared: tuple[float, ...]
    alone: tuple[float, ...]

    @classmethod
    def of(cls, results: Results, setting: Setting) -> Sweep:
        """Return what there is of a sweep."""
        seconds = {
            lr: [results.mean(setting.label(way, lr), WHOLE) for way in (SHARED, ALONE)] for lr in LEARNING_RATES
        }
        both = {lr: [way.mean for way in ways] for lr, ways in seconds.items() if all(way.n for way in ways)}
        return cls(setting, tuple(both), *(tuple(ways[place] for ways in both.values()) for place in (0, 1)))

    @property
    def gain(self) -> float:
        """Return all seconds without the cache over all with it."""
        return sum(self.alone) / sum(self.shared)

    @property
    def later_gain(self) -> Interval:
        """Return the speed-up of the runs after the first, which fills the cache, paired by learning rate."""
        ours, theirs = (dict(enumerate(seconds[1:])) for seconds in (self.shared, self.alone))
        return paired_ratio(theirs, ours)

    def pairs(self) -> list[tuple[str, str]]:
        """Return the labels of the runs that should be equal."""
        return [(self.setting.label(SHARED, lr), self.setting.label(ALONE, lr)) for lr in self.rates]


def sweeps(results: Results) -> list[Sweep]:
    """Return the sweeps that have more than one learning rate."""
    return [sweep for sweep in (Sweep.of(results, setting) for setting in SWEPT) if len(sweep.rates) > 1]


def bits_text(equal: int, unequal: int) -> str:
    """Return how many pairs of models are equal, as a sentence's end has it."""
    return "all models are equal bit for bit" if not unequal else f"{unequal} of {equal + unequal} models differ"


def of_sweep(results: Results, sweep: Sweep) -> str:
    """Return what a sweep took both ways."""
    return (
        f"{len(sweep.rates)} learning rates on one shared cache ({sweep.setting.words}) take "
        f"{seconds(sum(sweep.shared))} instead of {seconds(sum(sweep.alone))}: {factor(sweep.gain)} as fast, "
        f"{factor(sweep.alone[0] / sweep.shared[0])} the first, {shown(sweep.later_gain, factor, count=True)} those "
        f"that find the rows; {bits_text(*same_bits(results, sweep.pairs()))}."
    )


def answers(results: Results) -> list[Answer]:
    """Return by how much, when and when not; then cuts that move, the plan's error, and reads."""
    found, known = [benefit(results)], timed(results)
    if VOTED in timed(results, [VOTED], ON):
        texts = [
            f"`--cache {way}` {shown(gain(results, VOTED, way), factor, count=True)} as fast by the whole command"
            f"{stored_in(results, VOTED.label(way))}"
            for way in (ON, AUTO)
            if gain(results, VOTED, way).n
        ]
        text = f"{VOTED.words}: {'; '.join(texts)}."
        count = gain(results, VOTED).n
        negative = any(is_below(gain(results, VOTED, way), 1) for way in (ON, AUTO))
        found.append(Answer("Does it pay where the cut moves before it settles?", text, count, negative=negative))
    if known:
        texts = [
            f"{setting.words} {shown(plan_error(results, setting), signed_seconds)} of "
            f"{shown(results.change(setting.label(OFF), setting.label(ON), TRAINING), seconds)}"
            for setting in known
        ]
        text = f"Predicted minus saved by the clocks of training: {'; '.join(texts)}."
        count = min(plan_error(results, setting).n for setting in known)
        found.append(Answer("How wrong is the plan?", text, count))
    reads = Reads.of(results)
    if reads.rows:
        found.append(Answer("How fast are rows read?", reads.text(), reads.count()))
    return [answer for answer in found if answer.text]


def benefit(results: Results) -> Answer:
    """Return by how much the cache pays: sweeps first, then single runs that gain, then those that do not."""
    gains = {setting: gain(results, setting) for setting in timed(results)}
    order = sorted(gains, key=lambda setting: -gains[setting].mean)
    pays = [setting for setting in order if gains[setting].low > 1]
    told = [of_sweep(results, sweep) for sweep in sweeps(results)]
    for setting_group, begin in (
        (pays, "In one run whose cut stays, the whole command is faster: "),
        ([setting for setting in order if setting not in pays], "In one run no gain is shown: "),
    ):
        cells = [f"{setting.words} {shown(gains[setting], factor)}" for setting in setting_group]
        told += [f"{begin}{'; '.join(cells)}."] if cells else []
    if told:
        told.append("It cannot pay with fresh views, nor with fewer than two epochs for each view.")
    count = min(
        (gains[setting].n for setting in order), default=min(map(len, (s.rates for s in sweeps(results))), default=0)
    )
    negative = any(is_below(value, 1) for value in gains.values()) or any(s.gain < 1 for s in sweeps(results))
    return Answer("By how much does the cache pay, when, and when not?", " ".join(told), count, negative=negative)


def stored_in(results: Results, label: str) -> str:
    """Return in how many of a label's runs rows were stored, empty where in all."""
    rows = results.of(label)
    stored = sum(bool(row["cache_bytes"]) for row in rows)
    return "" if stored == len(rows) else f" (stored in {stored} of {len(rows)} runs)"


def signed_seconds(value: float) -> str:
    """Return a difference of seconds."""
    return f"{value:+.2f} s"


def tables(results: Results) -> list[Table]:
    """Return sweeps, whole commands, what the plan said, reads, and the flags of the runs."""
    found = [each_rate(results, sweep) for sweep in sweeps(results)]
    found += [table for table in (commands(results), planned_beside_saved(results)) if table.rows]
    reads = Reads.of(results)
    return [*found, *([reads.table()] if reads.rows else [])]


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


def pairs_of(results: Results) -> list[tuple[Setting, str]]:
    """Return the settings and the ways of caching that stand against runs without."""
    return [*((s, ON) for s in timed(results)), *((VOTED, way) for way in (ON, AUTO) if timed(results, [VOTED], way))]


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


@dataclass(frozen=True)
class Reads:
    """The rows of `analysis.cache_reads`, as texts: ranks, row_bytes, state, repeat, rows_per_second, resident."""

    rows: tuple[dict[str, str], ...]

    @classmethod
    def of(cls, results: Results) -> Reads:
        """Return those that lie beside the results."""
        return cls(tuple(texts_of(results.directory / READS)))

    def cases(self) -> list[tuple[str, str]]:
        """Return bytes of a row and ranks, in the order of the rows."""
        return list(dict.fromkeys((row["row_bytes"], row["ranks"]) for row in self.rows))

    def rate(self, row_bytes: str, ranks: str, state: str) -> Interval:
        """Return the rows a second of all ranks together, over the repetitions."""
        wanted = {"row_bytes": row_bytes, "ranks": ranks, "state": state}
        return mean_interval([float(row["rows_per_second"]) for row in self.rows if wanted.items() <= row.items()])

    def count(self) -> int:
        """Return the fewest repetitions of a case."""
        return min(self.rate(*case, state).n for case in self.cases() for state in ("cold", "warm"))

    def text(self) -> str:
        """Return rows a second by ranks, from a cold and from a warm page cache."""
        told = []
        for row_bytes in dict.fromkeys(row_bytes for row_bytes, _ in self.cases()):
            cells = [
                f"{ranks} {'rank' if ranks == '1' else 'ranks'} {thousands(self.rate(row_bytes, ranks, 'cold').mean)} "
                f"and {thousands(self.rate(row_bytes, ranks, 'warm').mean)}"
                for each, ranks in self.cases()
                if each == row_bytes
            ]
            told.append(f"of {int(row_bytes) // 1024} KB: {', '.join(cells)}")
        return f"Thousand rows a second of all ranks, cold and warm: {'; '.join(told)}."

    def table(self) -> Table:
        """Return the rates with their intervals, and what lay in the page cache before."""
        rows = []
        for row_bytes, ranks in self.cases():
            rates = [self.rate(row_bytes, ranks, state) for state in ("cold", "warm")]
            mine = [row for row in self.rows if (row["row_bytes"], row["ranks"]) == (row_bytes, ranks)]
            left = max(float(row["resident"]) for row in mine if row["state"] == "cold")
            told = (shown(rates[0], thousands), shown(rates[1], thousands, count=True))
            per_second = (f"{rate.mean * int(row_bytes) / 1e6:.0f}" for rate in rates)
            rows.append((f"{int(row_bytes) // 1024} KB", ranks, *told, *per_second, percent(left)))
        columns = ("Row", "Ranks", "Cold (1000 rows/s)", "Warm (1000 rows/s)", "Cold (MB/s)", "Warm (MB/s)")
        title = "Shuffled batches of 128 rows, all ranks together, each its own file (`python -m analysis.cache_reads`)"
        return Table(title=title, columns=(*columns, "Still in memory before cold reads"), rows=tuple(rows))


def thousands(rate: float) -> str:
    """Return a rate in thousands."""
    return f"{rate / 1e3:.3g}"


def drawings(results: Results) -> list[Drawing]:
    """Return a sweep's seconds as they add up, and the speed-up by image size."""
    found, known = [], sweeps(results)
    if known:
        lines = [
            Line(label=f"{words}, {sweep.setting.words}", points=added_up(taken), colour=colour, dash=dash)
            for sweep, dash in zip(known, ("-", "--"))
            for words, taken, colour in (
                ("no cache", sweep.alone, COLOURS[0]),
                ("shared cache", sweep.shared, COLOURS[1]),
            )
        ]
        caption = "Seconds of whole commands as learning rates are tried one after another; one run each."
        figure = line_chart(lines, x="learning rates tried", y="seconds of all commands so far")
        found.append(Drawing("learning-rates", caption, figure))
    settings = timed(results)
    if settings:
        lines = [
            Line(
                label=f"{cut} of {STAGES} stages, {words}",
                points={s.size: gain(results, s, column=column) for s in settings if s.cut == cut},
                colour=colour,
                dash=dash,
            )
            for cut, colour in zip(CUTS, COLOURS[2:])
            if any(s.cut == cut for s in settings)
            for words, column, dash in (("whole command", WHOLE, "-"), ("training", TRAINING, "--"))
        ]
        caption = (
            f"Speed-up by the cache in one run of {EPOCHS} epochs and two views; "
            f"{results.spread([setting.label(ON) for setting in settings])}."
        )
        figure = line_chart(lines, x="image size (pixels)", y="time without the cache over time with it", log_x=True)
        found.append(Drawing("speed-up", caption, figure))
    return found


def added_up(taken: Sequence[float]) -> dict[int, Interval]:
    """Return how much the first 1, 2, ... come to."""
    return {count: mean_interval([total]) for count, total in enumerate(itertools.accumulate(taken), 1)}


LIMITS = (
    "One machine with 2 cores and a local disk; a network file system is another case.",
    "Files that a run has just written lie in the page cache, as they would for its user.",
    "At 32 pixels CIFAR-10, above it photographs of signed digits: data and size change together.",
    "A sweep was made once; its interval is over the learning rates after the first.",
    "A whole command starts Python and MPI, reads images, trains, evaluates once at the end and writes the model.",
    "Before cold reads pages are unmapped, written back (fsync) and dropped (posix_fadvise); a virtual disk may cache too.",
)
EXPERIMENT = Experiment(
    NAME,
    "By how much the activation cache pays",
    runs,
    answers,
    tables,
    drawings,
    LIMITS,
    shown=5,
    one_factor=False,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
