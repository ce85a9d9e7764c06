"""What does each part of `--freeze auto` give, and what does it cost? Each is left out once.

    python -m analysis.auto_parts --preset reduced --data-dir DIR --weights FILE

The whole, with work worth four epochs of full fine-tuning on 5 000 samples, solves the head on every block's features,
tunes later blocks with votes, solves again and keeps the better of both on held-out samples.
"""

from __future__ import annotations

import sys

from analysis.parts.peers.labels import Cell
from analysis.peers import PEERS, SMOKE_SAMPLES, Ground
from analysis.sweeps.experiment import main
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.questions import Answer, Drawing, Experiment
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, is_below, shown, signed_points
from analysis.writing.charts import bar_chart
from hvfreeze.report.tables import Table
from hvfreeze.report.units import factor, percent, seconds

SAMPLES, EPOCHS = 5_000, 4
WHOLE, SOLVED = (Cell(samples=SAMPLES, peer="auto", epochs=epochs).label for epochs in (EPOCHS, 1))
"""Named as in `analysis.peers`, which makes the same runs: whoever comes first makes them for both."""
PARTS: dict[str, dict[str, Value]] = {
    SOLVED: {"epochs": 1, "evaluate_every": 1000},
    "without-votes": {"auto_without": "votes"},
    "without-guard": {"auto_without": "guard"},
    "without-last-solve": {"auto_without": "last-solve"},
    "linear-head": {"head_fit": "exact"},
    "last-block-only": {"head": "last"},
}
WORDS = {
    SOLVED: "tuning",
    "without-votes": "votes while tuning",
    "without-guard": "keeping the better on held-out samples",
    "without-last-solve": "solving again after tuning",
    "linear-head": "comparing rows instead of a linear head",
    "last-block-only": "features of all blocks but the last, and comparing rows",
}


def runs(preset: Preset) -> list[PlannedRun]:
    """Return the whole and what lacks a part; a seed's runs follow each other in time."""
    auto = PEERS["auto"]
    cell = Cell(samples=SMOKE_SAMPLES if preset.is_smoke else SAMPLES, peer="auto", epochs=EPOCHS)
    common = {**Ground().work(preset, cell, auto), "evaluate_every": 1000, "lr": auto.lr or preset.lr}
    chosen = ("without-votes",) if preset.is_smoke else tuple(PARTS)
    planned = []
    for seed in preset.seeds:
        for label in (WHOLE, *chosen):
            planned.append(preset.run(label, seed, {**common, **PARTS.get(label, {})}))
    return planned


def without(results: Results) -> list[str]:
    """Return the labels of runs that lack a part."""
    return [label for label in PARTS if results.of(label)]


def given(results: Results, label: str) -> Interval:
    """Return the points of accuracy that the part gives which is missing there, paired by seed."""
    return results.change(WHOLE, label)


def answers(results: Results) -> list[Answer]:
    """Return what each part gives and costs."""
    if not results.of(WHOLE):
        return []
    level, took = results.mean(WHOLE, "test_accuracy"), results.mean(WHOLE, "train_seconds")
    told = []
    for label in without(results):
        gain, longer = shown(given(results, label), signed_points), shown(spent(results, label), factor)
        told.append(f"{WORDS[label]} {gain} in {longer} the time")
    accuracy = shown(level, percent, count=True)
    text = (
        f"Work worth {EPOCHS} epochs gives {accuracy} in {shown(took, seconds)}. Of that, each part against the run "
        f"without it: {'; '.join(told) or 'nothing yet'}."
    )
    return [Answer(question="What does each part of --freeze auto give?", text=text, n=level.n)]


def spent(results: Results, label: str) -> Interval:
    """Return the whole's time over that of the run which lacks a part, paired by seed."""
    return results.gain(label, WHOLE)


def tables(results: Results) -> list[Table]:
    """Return accuracy and time of the whole and without each part."""
    columns = ("Left out", "Test accuracy", "It gives", "Shown", "Training time", "Time of the whole over it")
    rows = []
    for label in [WHOLE, *without(results)] if results.of(WHOLE) else []:
        accuracy = shown(results.mean(label, "test_accuracy"), percent, count=True)
        took = shown(results.mean(label, "train_seconds"), seconds)
        if label == WHOLE:
            rows.append(("nothing", accuracy, "", "", took, ""))
        else:
            gain = given(results, label)
            verdict = "it harms (negative)" if is_below(gain, 0) else "it helps" if gain.low > 0 else "no difference"
            more = shown(spent(results, label), factor)
            rows.append((WORDS[label], accuracy, shown(gain, signed_points), verdict, took, more))
    return [Table(columns=columns, rows=tuple(rows))]


def drawings(results: Results) -> list[Drawing]:
    """Return what each part gives as a figure."""
    gains = {WORDS[label]: given(results, label) for label in without(results)}
    if not gains or not results.of(WHOLE):
        return []
    caption = f"Points of test accuracy that each part gives, mean and 95 % interval, {results.count([WHOLE])}."
    return [Drawing(name="parts", caption=caption, figure=bar_chart(gains, x="points", scale=100, from_zero=False))]


EXPERIMENT = Experiment(
    name="auto_parts",
    title="What each part of --freeze auto gives",
    runs=runs,
    answers=answers,
    tables=tables,
    drawings=drawings,
    chooses_lr=True,
    reference=WHOLE,
    limits=(
        "CIFAR-10 at 32 pixels and one network that was trained on CIFAR-100; at 64 pixels tuning gives more.",
        "One number of samples and one number of epochs.",
        "All but the run without tuning were made beside another job on other cores: accuracies repeat, times do not.",
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
