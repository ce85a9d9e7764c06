"""What does a compressed exchange cost in accuracy?

    python -m analysis.compression --preset reduced --data-dir DIR --weights FILE

Full fine-tuning, all else equal: 5,000 samples, 4 epochs, the learning rate that was best for them on held-out samples.
What a compression saves in time depends on the network: analysis.network.
"""

from __future__ import annotations

import sys

from analysis.parts.peers import Cell
from analysis.peers import PEERS, Task
from analysis.sweeps.charts import bar_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Metric, Results
from analysis.sweeps.sweep import main

CELL = Cell(samples=5_000, peer="full", epochs=4)
LEARNING_RATE = 0.05
"""The cell's, by analysis.peers."""
PLAIN = CELL.label
VARIANTS = {f"{PLAIN}-{name.replace(':', '')}": name for name in ("fp16", "powersgd:16", "powersgd:4")}
"""Label -> `--compression`."""
SEEDS = 5
ALLOWED = 0.003
"""Largest loss of test accuracy that an exchange was allowed."""


def runs(preset: Preset) -> list[PlannedRun]:
    """Return the uncompressed run, which is that of analysis.peers, and each compression's; seed by seed."""
    common: dict[str, Value] = {"epochs": 1}
    if not preset.is_smoke:
        common = {**Task().work(preset, CELL, PEERS[CELL.peer]), "lr": LEARNING_RATE}
    planned = []
    for seed in preset.seeds if preset.is_smoke else range(SEEDS):
        planned.append(preset.run(PLAIN, seed, common))
        for label in preset.few(list(VARIANTS)):
            planned.append(preset.run(label, seed, {**common, "compression": VARIANTS[label]}))
    return planned


def verdict(results: Results, label: str) -> str:
    """Return what a change shows of what was allowed."""
    change = results.difference(label)
    if change.low >= -ALLOWED:
        return "within what is allowed"
    return "more than is allowed (negative)" if change.high < -ALLOWED else "too few runs to tell"


def words(results: Results) -> Words:
    return {
        "variants": VARIANTS,
        "with_plain": {PLAIN: "uncompressed", **VARIANTS},
        "plain": PLAIN,
        "verdict": lambda label: verdict(results, label),
        "columns": [
            Metric("Change", lambda r, label, _: "" if label == PLAIN else r.change(label)),
            Metric("Shown", lambda r, label, _: "" if label == PLAIN else verdict(r, label)),
        ],
    }


EXPERIMENT = Experiment(
    name="compression",
    runs=runs,
    words=words,
    drawings=lambda results: {
        "changes": bar_chart(
            {name: results.difference(label) for label, name in VARIANTS.items()},
            x="points of test accuracy",
            scale=100,
            from_zero=False,
        )
    },
    chooses_lr=True,
    own_seeds=True,
    reference=PLAIN,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
