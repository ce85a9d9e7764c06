"""What does the network cost, and what do freezing, caching and compression save of it? (Left open by the study.)

    python -m analysis.communication --preset reduced --data-dir DIR --weights FILE

One rank a node, on nodes of the local cluster (root and network namespaces needed; `launch/cluster check` says). Bytes
are counted at each node's interface, epoch by epoch. A few steps an epoch. Networks that the answer is about are
measured once for every seed, all variants in turn, and their spread is over runs; that of the others is over the epochs
of one run, after the first and, with low rank, after those in which it has not set in.
"""

from __future__ import annotations

import sys
from statistics import mode

from analysis.parts.networks.step_times import compute, images, milliseconds, pace, phase, step
from analysis.sweeps.charts import bar_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.launching import bits_per_second
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import shown
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
"""That low rank is given: it sets in after the first ten steps."""
CACHED = "frozen-cached"
NETWORK = (2, "1gbit")
"""The network that the answer is about."""
ONE_RUN = "Where a network has one run of a variant, its interval and n are over the epochs of that run."
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


def measured(results: Results, name: str, nodes: int, bandwidth: str) -> list[Run]:
    """Return a variant's runs on a network."""
    label = label_of(name, nodes, bandwidth)
    return results.runs_of(label) if results.of(label) else []


def answers(results: Results) -> list[Answer]:
    """Return the answer to question 6, at 1 Gbit/s on two nodes."""
    two = {name: measured(results, name, *NETWORK) for name in VARIANTS}
    one = {name: measured(results, name, 1, "") for name in VARIANTS}
    there = {name: runs for name, runs in two.items() if runs}
    alone = {name: runs for name, runs in one.items() if runs}
    if not there.keys() & alone.keys() >= VARIANTS.keys():
        return []
    sent = {name: results.mean(label_of(name, *NETWORK), "wire_bytes_per_step") for name in VARIANTS}
    waits = {name: phase(runs, "allreduce") for name, runs in there.items()}
    ranked = sorted(there, key=lambda name: step(there[name]).mean)
    steps = ", ".join(f"{name} {shown(step(there[name]), milliseconds)}" for name in ranked)
    low, alone_cached = pace(there[f"{CACHED}-powersgd"]), pace(alone[CACHED])
    text = (
        f"With four of six stages frozen and cached, two nodes with low rank at 1 Gbit/s train "
        f"{shown(low, images, count=True)}, one node {shown(alone_cached, images)}."
    )
    details = (
        (
            f"In full two nodes train {shown(pace(there['full']), images)}, one node "
            f"{shown(pace(alone['full']), images)}, two with low rank (powersgd:4) "
            f"{shown(pace(there['powersgd']), images)}."
        ),
        f"With four stages frozen and cached, uncompressed, two nodes train {shown(pace(there[CACHED]), images)}.",
        (
            f"A full step of batch {BATCH} takes {shown(step(there['full']), milliseconds, count=True)} there, "
            f"{shown(waits['full'], milliseconds)} of it exposed waiting for {megabytes(sent['full'].mean)} on the "
            "wire."
        ),
        f"With low rank the wait is {shown(waits['powersgd'], milliseconds)} for {megabytes(sent['powersgd'].mean)}.",
        f"Steps there, the shortest first: {steps}.",
        *([ONE_RUN] if any(len(runs) == 1 for runs in (*there.values(), *alone.values())) else []),
    )
    question = "6. What does communication cost, with freezing and caching, against one node?"
    # The method with what a slow network asks for, not the plain loop, is what is judged.
    negative = low.n > 1 and alone_cached.n > 1 and low.high < alone_cached.low
    return [Answer(question=question, text=text, n=len(there["full"]), negative=negative, details=details)]


def tables(results: Results) -> list[Table]:
    """Return a row per variant and network."""
    rows, usual = [], mode(results.machine(row) for row in results.rows) if results.rows else ""
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
    columns = (
        "Variant",
        "Runs",
        "Nodes",
        "Link",
        "Of all nodes",
        "Step",
        "Compute",
        "Exposed allreduce",
        "Compute / exposed",
        "Payload, a step of the run",
    )
    title = f"Seconds of rank 0, a step; * more ranks than cores; other machine: than {usual}. {ONE_RUN}"
    return [Table(title=title, columns=(*columns, "On the wire, a node", "At line rate"), rows=tuple(rows))]


def drawings(results: Results) -> list[Drawing]:
    """Return exposed waiting, and phases on the slowest network."""
    if not results.rows:
        return []
    several = [label_of(name, *on) for on in REPEATED[1:] for name in VARIANTS if results.of(label_of(name, *on))]
    waits = {label: phase(results.runs_of(label), "allreduce") for label in several}
    two = [label_of(name, *on) for on in REPEATED[:2] for name in VARIANTS if results.of(label_of(name, *on))]
    caption = (
        "Training time of rank 0 by phase, one node and two at 1 Gbit/s; speed-ups are over the full run of the same "
        "link and compression; the first run of each."
    )
    return [
        Drawing(
            name="exposed",
            caption="Time a step waits for gradients at 1 Gbit/s; mean and 95 % interval over runs (others: table).",
            figure=bar_chart(waits, x="exposed allreduce, a step (ms)", scale=1000),
        ),
        Drawing(
            name="phases",
            caption=caption,
            figure=plot_phases([results.runs_of(label)[0] for label in two], width=NARROW),
        ),
    ]


EXPERIMENT = Experiment(
    name="communication",
    title="Communication on 1, 2 and 4 nodes",
    runs=runs,
    answers=answers,
    tables=tables,
    drawings=drawings,
    limits=(
        "The nodes are network namespaces of one machine: links are limited, processors are shared.",
        "More ranks than cores (marked *) compute as much longer, and hide more of the exchange.",
        "No latency is added to the links.",
        ONE_RUN,
        "Runs of the first seed, which other work had disturbed, were made again after those of the others.",
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
