"""What does the network cost, and what do freezing, caching and compression save of it? (Left open by the study.)

    python -m analysis.communication --preset reduced --data-dir DIR --weights FILE

One rank a node, on nodes of the local cluster (root and network namespaces needed; `launch/cluster check` says). Bytes
are counted at each node's interface, epoch by epoch. A few steps an epoch. Networks that the answer is about are
measured once for every seed, all variants in turn, and their spread is over runs; that of the others is over the epochs
of one run, after the first and, with low rank, after those in which it has not set in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import mode

from matplotlib.figure import Figure

from analysis.sweeps.charts import bar_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.kept import unlike
from analysis.sweeps.launching import bits_per_second
from analysis.sweeps.pages import Words, milliseconds
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, mean_interval, shown
from analysis.sweeps.sweep import main
from hvfreeze.report.figures import NARROW, plot_phases
from hvfreeze.report.tables import Table, megabytes, number
from hvfreeze.runs.reading import Run

NODES = (1, 2, 4)
BANDWIDTHS = ("", "1gbit", "200mbit")
FROZEN: dict[str, Value] = {"freeze": "static", "cut": 4}
LOW_RANK: dict[str, Value] = {"compression": "powersgd:4"}
VARIANTS: dict[str, dict[str, Value]] = {
    "full": {},
    "fp16": {"compression": "fp16"},
    "powersgd": LOW_RANK,
    "frozen": FROZEN,
    "frozen-fp16": {**FROZEN, "compression": "fp16"},
    "frozen-cached": {**FROZEN, "cache": "on"},
    "frozen-cached-powersgd": {**FROZEN, "cache": "on", **LOW_RANK},
}
BATCH, STEPS, EPOCHS = 64, 4, 6
MORE_EPOCHS = 2
"""Additional epochs with low rank, which begins after the first ten steps."""
NETWORK = (2, "1gbit")
"""The network that the answer is about."""
REPEATED = ((1, ""), NETWORK, (4, "1gbit"))
"""Measured with every seed."""


def runs(preset: Preset) -> list[PlannedRun]:
    """Return every variant on every network; in the full preset the network is the one between --hosts."""
    if preset.is_smoke:
        return [short(preset, "full", nodes, bandwidth, {}) for nodes, bandwidth in ((1, ""), NETWORK)]
    limits = [""] if preset.name == "full" else list(BANDWIDTHS)
    networks = [(nodes, limit) for nodes in NODES for limit in limits if nodes > 1 or not limit]
    return [
        short(preset, name, nodes, bandwidth, flags, seed)
        for seed in preset.seeds
        for nodes, bandwidth in networks
        if preset.name == "full" or seed == preset.seeds[0] or (nodes, bandwidth) in REPEATED
        for name, flags in VARIANTS.items()
    ]


def short(
    preset: Preset, name: str, nodes: int, bandwidth: str, flags: dict[str, Value], seed: int | None = None
) -> PlannedRun:
    """Return a run of a few steps an epoch on a network, with the same work for every rank on any number of nodes."""
    batch = preset.batch_size if preset.is_smoke else BATCH
    work: dict[str, Value] = {
        "batch_size": batch,
        "epochs": 2 if preset.is_smoke else EPOCHS + (MORE_EPOCHS if flags.items() >= LOW_RANK.items() else 0),
        # A tenth is held out and evaluated on, for time is all that matters.
        "train_samples": nodes * batch * (STEPS + 1),
        "validation_fraction": 0.1,
        "augment": "none",
        "checkpoint_every": "0",
    }
    return preset.run(
        label_of(name, nodes, bandwidth),
        preset.seeds[0] if seed is None else seed,
        {**work, **flags},
        ranks=nodes,
        nodes=0 if preset.name == "full" else nodes,
        bandwidth=bandwidth,
    )


def label_of(name: str, nodes: int, bandwidth: str) -> str:
    """Return a variant's label on a network."""
    return f"{name}-{nodes}x" + (f"-{bandwidth}" if bandwidth else "")


def phase(runs: Sequence[Run], *names: str) -> Interval:
    """Return seconds a step in some phases: the spread is that of runs, of one run that of its timed epochs."""
    each = [of_epochs(run, *names) for run in runs]
    return each[0] if len(each) == 1 else mean_interval([interval.mean for interval in each])


def of_epochs(run: Run, *names: str) -> Interval:
    """Return seconds a step in some phases, over the epochs that are timed."""
    found, left_out = [], unlike(run)
    for before, line in list(zip(run.metrics, run.metrics[1:]))[max(0, left_out - 1) :]:
        spent = sum(line["seconds"].get(name, 0.0) for name in names)
        found.append(spent / (line["step"] - before["step"]))
    return mean_interval(found)


def step(runs: Sequence[Run]) -> Interval:
    """Return seconds a step."""
    return phase(runs, *runs[0].seconds.keys() - {"evaluate"})


def compute(runs: Sequence[Run]) -> Interval:
    """Return seconds a step in which the rank computes."""
    return phase(runs, "forward", "backward", "optimizer")


def pace(runs: Sequence[Run]) -> Interval:
    """Return the images that all ranks train in a second."""
    taken, images = step(runs), runs[0].size * runs[0].settings["batch_size"]
    return Interval(images / taken.mean, images / taken.high, images / taken.low, taken.n)


def images(value: float) -> str:
    """Return a pace for a person."""
    return f"{value:.0f} images/s"


def table(results: Results) -> str:
    """Return a row per variant and network."""
    rows, usual = [], usual_machine(results)
    for label in results.labels:
        row, runs = results.of(label)[0], results.runs_of(label)
        wire = row["wire_bytes_per_step"]
        line = 8 * wire / bits_per_second(row["bandwidth"] or "") if wire else 0.0
        waiting = phase(runs, "allreduce")
        rows.append(
            (
                label.rpartition("x")[0].rpartition("-")[0]
                + ("" if results.machine(row) == usual else " (other machine)"),
                str(len(runs)),
                f"{row['ranks']}{' *' if row['ranks'] > (runs[0].environment.get('cores') or 1) else ''}",
                row["bandwidth"] or "unlimited",
                shown(pace(runs), images),
                shown(step(runs), milliseconds),
                shown(compute(runs), milliseconds),
                shown(waiting, milliseconds),
                number(compute(runs).mean / waiting.mean) if waiting.mean > 0.0005 else "",
                megabytes(row["allreduce_bytes"] / row["steps"]),
                megabytes(wire) if wire is not None else "",
                milliseconds(line) if line else "",
            )
        )
    columns = ("Variant", "Runs", "Nodes", "Link", "Of all nodes", "Step", "Compute", "Exposed allreduce")
    more = ("Compute / exposed", "Payload, a step of the run", "On the wire, a node", "At line rate")
    return Table(columns=(*columns, *more), rows=tuple(rows)).to_text()


def usual_machine(results: Results) -> str:
    """Return the machine of most runs."""
    return mode(results.machine(row) for row in results.rows)


def words(results: Results) -> Words:
    def runs(name: str, nodes: int = NETWORK[0]) -> list[Run]:
        return results.runs_of(label_of(name, nodes, NETWORK[1] if nodes > 1 else ""))

    return {
        "pace": lambda name, nodes=NETWORK[0], n=False: shown(pace(runs(name, nodes)), images, count=n),
        "step": lambda name, n=False: shown(step(runs(name)), milliseconds, count=n),
        "waits": lambda name: shown(phase(runs(name), "allreduce"), milliseconds),
        "sent": lambda name: megabytes(results.mean(label_of(name, *NETWORK), "wire_bytes_per_step").mean),
        "ranked": sorted(VARIANTS, key=lambda name: step(runs(name)).mean),
        "usual": usual_machine(results),
        "table": table(results),
    }


def drawings(results: Results) -> Mapping[str, Figure]:
    """Return exposed waiting, and phases on the slowest network."""
    several = [label_of(name, *on) for on in REPEATED[1:] for name in VARIANTS]
    waits = {label: phase(results.runs_of(label), "allreduce") for label in several}
    two = [label_of(name, *on) for on in REPEATED[:2] for name in VARIANTS]
    return {
        "exposed": bar_chart(waits, x="exposed allreduce, a step (ms)", scale=1000),
        "phases": plot_phases([results.runs_of(label)[0] for label in two], width=NARROW),
    }


EXPERIMENT = Experiment(name="communication", runs=runs, words=words, drawings=drawings)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
