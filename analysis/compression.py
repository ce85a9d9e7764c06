"""What does a compressed exchange cost in accuracy?

    python -m analysis.compression --preset reduced --data-dir DIR --weights FILE

Full fine-tuning, all else equal: 5 000 samples, 4 epochs, the learning rate that was best for them on held-out samples.
What a compression saves in time depends on the network: analysis.network.
"""

from __future__ import annotations

import sys

from analysis.parts.peers import Cell
from analysis.peers import PEERS, Ground
from analysis.sweeps.charts import bar_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, shown, signed_points
from analysis.sweeps.sweep import main
from hvfreeze.report.tables import Table, megabytes, percent

CELL = Cell(samples=5_000, peer="full", epochs=4)
LEARNING_RATE = 0.05
"""The cell's, by analysis.peers."""
PLAIN = CELL.label
VARIANTS = ("fp16", "powersgd:16", "powersgd:4")
SEEDS = 5
ALLOWED = 0.003
"""Of test accuracy: what an exchange was asked to cost at most."""


def label_of(compression: str) -> str:
    """Return what a compression's runs are called."""
    return f"{PLAIN}-{compression.replace(':', '')}"


def runs(preset: Preset) -> list[PlannedRun]:
    """Return the uncompressed run, which is that of analysis.peers, and each compression's; seed by seed."""
    common: dict[str, Value] = {"epochs": 1}
    if not preset.is_smoke:
        common = {**Ground().work(preset, CELL, PEERS[CELL.peer]), "lr": LEARNING_RATE}
    planned = []
    for seed in preset.seeds if preset.is_smoke else range(SEEDS):
        planned.append(preset.run(PLAIN, seed, common))
        for compression in preset.few(VARIANTS):
            planned.append(preset.run(label_of(compression), seed, {**common, "compression": compression}))
    return planned


def changes(results: Results) -> dict[str, Interval]:
    """Return each compression's change of test accuracy, paired by seed; only of those that have rows."""
    if not results.of(PLAIN):
        return {}
    return {name: results.change(label_of(name), PLAIN) for name in VARIANTS if results.of(label_of(name))}


def verdict(change: Interval) -> str:
    """Return what a change shows of what was allowed."""
    if change.low >= -ALLOWED:
        return "within what is allowed"
    return "more than is allowed (negative)" if change.high < -ALLOWED else "too few runs to tell"


def answers(results: Results) -> list[Answer]:
    """Return what each compression changes."""
    found = changes(results)
    if not found:
        return []
    told = tuple(f"{name} {shown(change, signed_points)}: {verdict(change)}." for name, change in found.items())
    level = results.mean(PLAIN, "test_accuracy")
    worst = min(found, key=lambda name: found[name].mean)
    text = (
        f"The most with {worst}: {shown(found[worst], signed_points, count=True)}, where at most "
        f"{100 * ALLOWED:.1f} points less were asked for."
    )
    details = (f"Uncompressed, {CELL.epochs} epochs give {shown(level, percent, count=True)}. Instead:", *told)
    question = "What does a compressed exchange cost in accuracy?"
    lost = any(change.high < -ALLOWED for change in found.values())
    return [Answer(question=question, text=text, n=level.n, negative=lost, details=details)]


def tables(results: Results) -> list[Table]:
    """Return every compression's accuracy, its change, and the bytes that a rank puts into the exchange."""
    rows = []
    for name, label in ((name, label_of(name) if name else PLAIN) for name in ("", *changes(results))):
        if results.of(label):
            change = changes(results).get(name)
            told = ("", "") if change is None else (shown(change, signed_points), verdict(change))
            accuracy = shown(results.mean(label, "test_accuracy"), percent, count=True)
            sent = megabytes(results.mean(label, "allreduce_bytes").mean)
            rows.append((name or "uncompressed", accuracy, *told, sent))
    columns = ("Compression", "Test accuracy", "Change", "Shown", "Exchanged by a rank")
    return [Table(columns=columns, rows=tuple(rows))]


def drawings(results: Results) -> list[Drawing]:
    """Return the changes as a figure."""
    found = changes(results)
    if not found:
        return []
    caption = (
        f"Change of test accuracy against the uncompressed exchange, mean and 95 % interval, {results.count([PLAIN])}."
    )
    figure = bar_chart(found, x="points of test accuracy", scale=100, from_zero=False)
    return [Drawing(name="changes", caption=caption, figure=figure)]


EXPERIMENT = Experiment(
    name="compression",
    title="What a compressed exchange costs in accuracy",
    runs=runs,
    answers=answers,
    tables=tables,
    drawings=drawings,
    chooses_lr=True,
    own_seeds=True,
    reference=PLAIN,
    limits=(
        "Two ranks, 39 steps an epoch, of which the first 10 are uncompressed with powersgd.",
        "The learning rate is the best for the uncompressed exchange.",
        "CIFAR-10 and one network that was trained on CIFAR-100: related images, a related task.",
        "Accuracies only; runs were not timed.",
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
