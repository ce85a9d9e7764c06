"""A wide perceptron in subnets: accuracy by bytes, compared with local SGD, replicas and low rank.

A round of n ranks on d inputs, two hidden layers of h neurons and c classes sends, in each direction and over all
ranks, 4 (n-1) (d h/n + h^2/n^2 + h c/n + 4 h/n) bytes.
Source: Yuan et al., "Distributed Learning of Fully Connected Neural Networks using Independent Subnet Training", VLDB
2022, arXiv 1910.02120.
"""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.figure import Figure

from analysis.sweeps.charts import FIGURE_WIDTH, LEGEND_COLUMNS, OTHERS, set_log_scale
from analysis.sweeps.launching import bits_per_second
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import (
    Interval,
    mean_interval,
    of_seeds,
    paired_difference,
    paired_ratio,
    shown,
    signed_points,
)
from hvfreeze.report.figures import BASELINE, STYLE
from hvfreeze.report.tables import Table, megabytes, percent, seconds
from hvfreeze.runs.reading import Run

INPUTS, WIDTH, CLASSES = 3 * 16 * 16, 512, 10
EPOCHS, BATCH = 30, 128
"""The batch is that of all ranks."""
ROUNDS = (1, 10, 50)
WAYS: dict[str, dict[str, Value]] = {
    "replicas": {"strategy": "replicas"},
    "low-rank": {"strategy": "replicas", "compression": "powersgd:4"},
    **{f"local-sgd-{steps}": {"strategy": "local-sgd", "local_steps": steps} for steps in ROUNDS},
    **{f"subnets-{steps}": {"strategy": "subnets", "local_steps": steps} for steps in ROUNDS},
}
KINDS = ("low-rank", "local-sgd", "subnets")
MANY, MANY_WAYS = 4, ("replicas", "local-sgd-10", "subnets-10")
"""Numbers of ranks, and the methods that run on each."""
NETWORKS = {"200 Mbit/s": "200mbit", "1 Gbit/s": "1gbit"}


def planned(preset: Preset) -> list[PlannedRun]:
    """Return the runs on two ranks, then those on four."""
    if preset.is_smoke:
        return [run(preset, way, 2, seed=0) for way in ("replicas", "local-sgd-10", "subnets-1")]
    two = [run(preset, way, 2, seed=seed) for seed in preset.seeds for way in WAYS]
    return [*two, *(run(preset, way, MANY, seed=seed) for seed in preset.seeds for way in MANY_WAYS)]


def run(preset: Preset, way: str, ranks: int, *, seed: int) -> PlannedRun:
    """Return a run of the perceptron on CIFAR-10 at 16 pixels, by plain SGD in all ways."""
    flags: dict[str, Value] = {
        "data": "digits" if preset.is_smoke else "cifar10",
        "model": f"mlp-{WIDTH}x{WIDTH}",
        "image_size": 16,
        "train_samples": 64 if preset.is_smoke else 5000,
        "augment": "none",
        "batch_size": 8 if preset.is_smoke else BATCH // ranks,
        "epochs": 2 if preset.is_smoke else EPOCHS,
        "lr": 0.1,
        "momentum": 0.0,
        "schedule": "cosine",
        "checkpoint_every": "0",
        "threads": 1,
    }
    return PlannedRun(label=label_of(way, ranks), seed=seed, flags={**flags, **WAYS[way]}, ranks=ranks)


def label_of(way: str, ranks: int) -> str:
    """Return the label of a way's runs on so many ranks."""
    return f"mlp-{ranks}-{way}"


def ranks_of(run: Run) -> int:
    """Return how many ranks a run had."""
    return int((run.summary or {})["world_size"])


def sent_bytes(run: Run, told: dict[str, Any] | None = None) -> float:
    """Return what all ranks sent for training until a line of the metrics, or to the end.

    Local SGD and subnets count what they send. An allreduce is taken for a ring's, in which each of n ranks sends
    2 (n-1) / n of the payload.
    """
    line = (run.summary or {}) if told is None else told
    counted = line.get("subnets") or line.get("local_sgd")
    if counted:
        return float(sum(counted["wire_bytes"].values()))
    return float(2 * (ranks_of(run) - 1) * line["allreduce_bytes"])


def predicted_bytes(run: Run) -> dict[str, int]:
    """Return what the formula says that subnets sent in all rounds; one that was not ended was dealt all the same."""
    n, steps, local = ranks_of(run), int(run.metrics[-1]["step"]), int(run.settings["local_steps"])
    share = INPUTS * WIDTH // n + (WIDTH // n) ** 2 + WIDTH * CLASSES // n + 4 * WIDTH // n
    each = 4 * (n - 1) * share
    return {"dealt": each * -(-steps // local), "returned": each * (steps // local)}


def best(run: Run) -> tuple[float, float]:
    """Return a run's best accuracy and what had been sent by the first epoch that had it."""
    line = max(run.metrics, key=lambda line: (line["test_accuracy"], -line["epoch"]))
    return float(line["test_accuracy"]), sent_bytes(run, line)


def bytes_until(run: Run, accuracy: float) -> float | None:
    """Return what had been sent when a run was first as accurate, None where it never was."""
    reached = [line for line in run.metrics if line["test_accuracy"] >= accuracy]
    return sent_bytes(run, reached[0]) if reached else None


def against_replicas(results: Results, way: str, ranks: int) -> tuple[Interval, int, int]:
    """Return the bytes until the replicas' best accuracy over theirs, in how many runs it was reached, and of how many.

    Paired by seed.
    """
    targets = results.of_runs(label_of("replicas", ranks), best)
    runs = {
        seed: run for seed, run in results.of_runs(label_of(way, ranks), lambda run: run).items() if seed in targets
    }
    until = {seed: bytes_until(run, targets[seed][0]) for seed, run in runs.items()}
    reached = {seed: sent for seed, sent in until.items() if sent}
    return paired_ratio(reached, {seed: sent for seed, (_, sent) in targets.items()}), len(reached), len(runs)


def reach(results: Results, way: str, ranks: int) -> str:
    """Return how many runs reach the replicas' best accuracy, and with which part of their bytes."""
    ratio, reached, runs = against_replicas(results, way, ranks)
    part = f", with {shown(ratio, percent)} of the bytes that these sent until then" if reached else ""
    return f"With rounds of 10 steps {reached} of {runs} runs reach the replicas' best accuracy{part}."


def bests(results: Results, way: str, ranks: int) -> dict[int, float]:
    """Return the best accuracy of each run."""
    return results.of_runs(label_of(way, ranks), lambda run: best(run)[0])


def made() -> list[tuple[str, int]]:
    """Return ways and numbers of ranks."""
    return [*((way, 2) for way in WAYS), *((way, MANY) for way in MANY_WAYS)]


def table(results: Results) -> str:
    """Return accuracy, bytes and seconds of all ways."""
    rows = []
    for way, ranks in made():
        runs = results.runs_of(label_of(way, ranks))
        sent = mean_interval([sent_bytes(run) for run in runs]).mean
        ratio, reached, number = against_replicas(results, way, ranks)
        rows.append(
            (
                f"{way}, {ranks} ranks",
                shown(of_seeds(bests(results, way, ranks)), percent),
                shown(results.mean(label_of(way, ranks), "test_accuracy"), percent),
                megabytes(sent),
                f"{shown(ratio, percent)}, {reached} of {number}" if reached else f"never, 0 of {number}",
                *(seconds(sent / ranks * 8 / bits_per_second(rate)) for rate in NETWORKS.values()),
                shown(mean_interval([(run.summary or {})["cpu_seconds"] for run in runs]), seconds),
            )
        )
    columns = ("Run", "Best accuracy", "Last accuracy", "Sent by all ranks", "Of the replicas' bytes, until their best")
    more = (*(f"Model: bytes at {name}" for name in NETWORKS), "Processor, rank 0")
    return Table(columns=(*columns, *more), rows=tuple(rows)).to_text()


def round_of(run: Run, name: str) -> tuple[str, ...]:
    """Return the share of each matrix that a round trains, and measured and computed bytes."""
    told = (run.summary or {})["subnets"]
    matrices = ("hidden1.linear.weight", "hidden2.linear.weight", "head.linear.weight")
    sent = {lane: int(told["wire_bytes"][lane]) for lane in ("dealt", "returned")}
    fits = "yes" if sent == predicted_bytes(run) else "NO"
    return (name, *(percent(told["touched"][each]) for each in matrices), megabytes(sum(sent.values())), fits)


def words(results: Results) -> Words:
    subnets = [(way, ranks) for way, ranks in made() if way.startswith("subnets")]
    rounds = tuple(round_of(results.runs_of(label_of(*each))[0], f"{each[0]}, {each[1]} ranks") for each in subnets)
    columns = ("Run", "First matrix", "Between hidden layers", "Last matrix", "Sent", "As predicted")
    return {
        "reach": lambda way, ranks: reach(results, way, ranks),
        "theirs": lambda ranks: shown(of_seeds(bests(results, "replicas", ranks)), percent),
        "change": lambda way, ranks: shown(
            paired_difference(bests(results, way, ranks), bests(results, "replicas", ranks)), signed_points
        ),
        "table": table(results),
        "rounds": Table(columns=columns, rows=rounds).to_text(),
    }


def chart(results: Results) -> Figure:
    """Return accuracy against bytes on two ranks, all epochs of a way a line."""
    ways = [way for way in WAYS if not way.endswith(f"-{ROUNDS[-1]}")]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(FIGURE_WIDTH, 0.85 * FIGURE_WIDTH), layout="constrained")
        axes = figure.add_subplot()
        for way in ways:
            runs = results.runs_of(label_of(way, 2))
            # Cumulative bests, since a curve of single epochs crosses every level many times.
            epochs = range(min(len(run.metrics) for run in runs))
            bests = [[max(line["test_accuracy"] for line in run.metrics[: e + 1]) for run in runs] for e in epochs]
            axes.plot(
                [sent_bytes(runs[0], runs[0].metrics[epoch]) / 1e6 for epoch in epochs],
                [100 * sum(values) / len(values) for values in bests],
                color=BASELINE if way == "replicas" else OTHERS[KINDS.index(way.rstrip("-0123456789"))],
                linestyle="--" if way.endswith(f"-{ROUNDS[0]}") else "-",
                marker=".",
                markersize=3,
                label=way,
            )
        axes.set(xlabel="sent by all ranks (MB)", ylabel="best test accuracy so far (%)")
        set_log_scale(axes)
        figure.legend(loc="outside upper left", ncols=LEGEND_COLUMNS)
        return figure
