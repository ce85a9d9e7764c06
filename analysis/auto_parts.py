"""What does each part of `--freeze auto` give, and what does it cost? Each is left out once.

    python -m analysis.auto_parts --preset reduced --data-dir DIR --weights FILE

The whole, with work worth four epochs of full fine-tuning on 5 000 samples, solves the head on every block's features,
tunes later blocks with votes, solves again and keeps the better of both on held-out samples.
"""

from __future__ import annotations

import sys

from analysis.parts.peers import Cell
from analysis.peers import PEERS, SMOKE_SAMPLES, Ground
from analysis.sweeps.charts import bar_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, verdict
from analysis.sweeps.sweep import main
from hvfreeze.report.tables import Table

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
    chosen = {"without-votes": PARTS["without-votes"]} if preset.is_smoke else PARTS
    return preset.runs({WHOLE: {}, **chosen}, common)


def given(results: Results, label: str) -> Interval:
    """Return the points of accuracy that the part gives which is missing there, paired by seed."""
    return results.change(WHOLE, label)


def answers(results: Results) -> list[Answer]:
    """Return what each part gives and costs: points, and the whole's time over that of the run which lacks it."""
    if not results.of(WHOLE):
        return []
    made = [label for label in WORDS if results.of(label)]
    if not made:
        return []
    most = max(made, key=lambda label: given(results, label).mean)
    text = f"The most by {WORDS[most]}: {results.change_text(WHOLE, most, count=True)}."
    details = (
        (
            f"Work worth {EPOCHS} epochs gives {results.accuracy_text(WHOLE, count=True)} in "
            f"{results.time_text(WHOLE)}. Of that, each part against the run without it:"
        ),
        *(
            f"{WORDS[label]} {results.change_text(WHOLE, label)} in {results.gain_text(label, WHOLE)} the time"
            for label in made
        ),
    )
    return [Answer("What does each part of --freeze auto give?", text, len(results.of(WHOLE)), details=details)]


def tables(results: Results) -> list[Table]:
    """Return accuracy and time of the whole and without each part."""
    columns = ("Left out", "Test accuracy", "It gives", "Shown", "Training time", "Time of the whole over it")
    if not results.of(WHOLE):
        return [Table(columns=columns, rows=())]
    rows = [("nothing", results.accuracy_text(WHOLE, count=True), "", "", results.time_text(WHOLE), "")]
    for label in filter(results.of, PARTS):
        shows = verdict(given(results, label), "it helps", "it harms", "no difference")
        told = (WORDS[label], results.accuracy_text(label, count=True), results.change_text(WHOLE, label), shows)
        rows.append((*told, results.time_text(label), results.gain_text(label, WHOLE)))
    return [Table(columns=columns, rows=tuple(rows))]


def drawings(results: Results) -> list[Drawing]:
    """Return what each part gives as a figure."""
    gains = {WORDS[label]: given(results, label) for label in filter(results.of, PARTS)}
    if not gains or not results.of(WHOLE):
        return []
    caption = f"Points of test accuracy that each part gives, {results.spread([WHOLE])}."
    return [Drawing("parts", caption, bar_chart(gains, x="points", scale=100, from_zero=False))]


LIMITS = (
    "CIFAR-10 at 32 pixels and one network that was trained on CIFAR-100; at 64 pixels tuning gives more.",
    "One number of samples and one number of epochs.",
    "All but the run without tuning were made beside another job on other cores: accuracies repeat, times do not.",
)
EXPERIMENT = Experiment(
    "auto_parts",
    "What each part of --freeze auto gives",
    runs,
    answers,
    tables,
    drawings,
    LIMITS,
    chooses_lr=True,
    reference=WHOLE,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
