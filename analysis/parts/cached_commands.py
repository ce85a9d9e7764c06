"""Whole commands with the cache beside the same without: what is run, and what the pairs and sweeps come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from analysis.parts.read_tables import Reads
from analysis.sweeps.experiment import Answer
from analysis.sweeps.presets import Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, is_below, of_seeds, paired_ratio, shown
from hvfreeze.report.tables import factor, seconds

NAME = "cache_benefit"
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
CUTS = (4, 5)
VOTED_SIZE = 64
SWEEPS = ((128, 5), (64, 4))
"""Image size and cut of the sweeps over learning rates, the one in which most is expected first."""
LEARNING_RATES = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Setting:
    """What is run with and without the cache: an image size, and a cut that stays, or None for one that moves."""

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


def pairs_of(results: Results) -> list[tuple[Setting, str]]:
    """Return the settings and the ways of caching that stand against runs without."""
    return [*((s, ON) for s in timed(results)), *((VOTED, way) for way in (ON, AUTO) if timed(results, [VOTED], way))]


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
        first, *others = [f"{VOTED.words}: {text}." for text in texts]
        count = gain(results, VOTED).n
        negative = any(is_below(gain(results, VOTED, way), 1) for way in (ON, AUTO))
        question = "Does it pay where the cut moves before it settles?"
        found.append(Answer(question, first, count, negative=negative, details=tuple(others)))
    if known:
        errors = {setting: plan_error(results, setting) for setting in known}
        worst = max(known, key=lambda setting: abs(errors[setting].mean))
        text = (
            f"At most {shown(errors[worst], signed_seconds, count=True)} a rank, predicted minus saved: {worst.words}."
        )
        details = tuple(
            f"Predicted minus saved by the clocks of training, {setting.words}: "
            f"{shown(errors[setting], signed_seconds)} of "
            f"{shown(results.change(setting.label(OFF), setting.label(ON), TRAINING), seconds)}."
            for setting in known
        )
        found.append(Answer("How wrong is the plan?", text, min(e.n for e in errors.values()), details=details))
    reads = Reads.of(results.directory)
    if reads.rows:
        found.append(Answer("How fast are rows read?", reads.claim(), reads.count(), details=(reads.text(),)))
    return [answer for answer in found if answer.text]


def benefit(results: Results) -> Answer:
    """Return by how much the cache pays: sweeps first, then single runs that gain, then those that do not."""
    gains = {setting: gain(results, setting) for setting in timed(results)}
    order = sorted(gains, key=lambda setting: -gains[setting].mean)
    pays = [setting for setting in order if gains[setting].low > 1]
    told = [of_sweep(results, sweep) for sweep in sweeps(results)]
    others = [setting for setting in order if setting not in pays]
    begins = ("In one run whose cut stays, the whole command is faster: ", "In one run no gain is shown: ")
    for begin, settings in zip(begins, (pays, others)):
        cells = [f"{setting.words} {shown(gains[setting], factor)}" for setting in settings]
        told += [f"{begin}{'; '.join(cells)}."] if cells else []
    if told:
        told.append("It cannot pay with fresh views, nor in one run that has no more epochs than views.")
    counts = [gains[setting].n for setting in order] or [len(sweep.rates) for sweep in sweeps(results)]
    negative = any(is_below(value, 1) for value in gains.values()) or any(
        is_below(sweep.later_gain, 1) for sweep in sweeps(results)
    )
    question = "By how much does the cache pay, when, and when not?"
    return Answer(question, claim_of(results, order), min(counts, default=0), negative=negative, details=tuple(told))


def claim_of(results: Results, order: Sequence[Setting]) -> str:
    """Return the one claim: the sweep that gains most, else the single run that does; empty without either."""
    if swept := sweeps(results):
        best = max(swept, key=lambda sweep: sweep.gain)
        return (
            f"{len(best.rates)} learning rates tried on one shared cache are {factor(best.gain)} as fast in all, "
            f"{shown(best.later_gain, factor, count=True)} after the first ({best.setting.words})."
        )
    if order:
        best_run = shown(gain(results, order[0]), factor, count=True)
        return f"The whole command of one run is {best_run} as fast ({order[0].words})."
    return ""


def in_brief(results: Results) -> list[str]:
    """Return by how much the cache pays as entries of a list, one case each."""
    lines = [
        f"- {len(sweep.rates)} learning rates on one `--cache-dir`, {sweep.setting.words}: {factor(sweep.gain)} as "
        f"fast in all, {shown(sweep.later_gain, factor, count=True)} after the first."
        for sweep in sweeps(results)
    ]
    return lines + [
        f"- One run, {setting.words}, `--cache {way}`: "
        f"{shown(gain(results, setting, way), factor, count=True)} as fast."
        for setting, way in pairs_of(results)
    ]


def stored_in(results: Results, label: str) -> str:
    """Return in how many of a label's runs rows were stored, empty where in all."""
    rows = results.of(label)
    stored = sum(bool(row["cache_bytes"]) for row in rows)
    return "" if stored == len(rows) else f" (stored in {stored} of {len(rows)} runs)"


def signed_seconds(value: float) -> str:
    """Return a difference of seconds."""
    return f"{value:+.2f} s"
