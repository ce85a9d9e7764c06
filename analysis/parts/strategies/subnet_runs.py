"""A wide perceptron in pieces: accuracy by bytes beside local SGD, replicas and low rank, and what a round touches.

A round of n ranks on d inputs, two hidden layers of h neurons and c classes sends, in each direction and over all
ranks, 4 (n-1) (d h/n + h^2/n^2 + h c/n + 4 h/n) bytes.
Source: Yuan et al., "Distributed Learning of Fully Connected Neural Networks using Independent Subnet Training", VLDB
2022, arXiv 1910.02120.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from analysis.sweeps.charts import FIGURE_WIDTH, LEGEND_COLUMNS, OTHERS, set_log_scale
from analysis.sweeps.experiment import Answer, Drawing
from analysis.sweeps.launching import bits_per_second
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
"""Ranks, and what is tried on so many too."""
NETWORKS = {"200 Mbit/s": "200mbit", "1 Gbit/s": "1gbit"}
FEW_BYTES = 0.1
"""Of the replicas' bytes, in which subnets are to be as accurate."""


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


def kept(results: Results, way: str, ranks: int) -> list[Run]:
    """Return the kept runs of a way."""
    label = label_of(way, ranks)
    return results.runs_of(label) if results.of(label) else []


def by_seed(runs: list[Run], value: Callable[[Run], float]) -> dict[int, float]:
    """Return a number of each run by its seed."""
    return {run.settings["seed"]: value(run) for run in runs}


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
    targets = {run.settings["seed"]: best(run) for run in kept(results, "replicas", ranks)}
    runs = [run for run in kept(results, way, ranks) if run.settings["seed"] in targets]
    until = {run.settings["seed"]: bytes_until(run, targets[run.settings["seed"]][0]) for run in runs}
    reached = {seed: sent for seed, sent in until.items() if sent}
    return paired_ratio(reached, {seed: sent for seed, (_, sent) in targets.items()}), len(reached), len(runs)


def answers(results: Results) -> list[Answer]:
    """Return how many bytes subnets and local SGD need, and how accurate they get."""
    return [*of_subnets(results), *of_local_sgd(results)]


def of_subnets(results: Results) -> list[Answer]:
    """Return what subnets save, on each number of ranks."""
    found = []
    for ranks in (2, MANY):
        ratio, reached, runs = against_replicas(results, "subnets-10", ranks)
        if runs:
            text, details = reach(ratio, reached, runs), changes(results, "subnets", ranks)
            question = f"What do subnets of a perceptron save on {ranks} ranks?"
            fails = reached < runs or ratio.mean > FEW_BYTES
            found.append(Answer(question=question, text=text, n=runs, negative=fails, details=details))
    return found


def of_local_sgd(results: Results) -> list[Answer]:
    """Return what local SGD costs and saves on two ranks."""
    ratio, reached, runs = against_replicas(results, "local-sgd-10", 2)
    if not runs:
        return []
    text, details = reach(ratio, reached, runs), changes(results, "local-sgd", 2)
    question = "What does local SGD of a perceptron save on 2 ranks?"
    return [Answer(question=question, text=text, n=runs, negative=not reached, details=details)]


def reach(ratio: Interval, reached: int, runs: int) -> str:
    """Return how many runs reach the replicas' best accuracy, and with which part of their bytes."""
    part = f", with {shown(ratio, percent)} of the bytes that these sent until then" if reached else ""
    return f"With rounds of 10 steps {reached} of {runs} runs reach the replicas' best accuracy{part}."


def changes(results: Results, kind: str, ranks: int) -> tuple[str, ...]:
    """Return the best accuracy of all rounds of a kind against the replicas' best."""
    theirs = by_seed(kept(results, "replicas", ranks), lambda run: best(run)[0])
    told = []
    for steps in ROUNDS:
        own = by_seed(kept(results, f"{kind}-{steps}", ranks), lambda run: best(run)[0])
        if own:
            told.append(f"{shown(paired_difference(own, theirs), signed_points)} with J = {steps}")
    return f"Best accuracy against theirs ({shown(of_seeds(theirs), percent)}):", *told


def tables(results: Results) -> list[Table]:
    """Return accuracy, bytes and seconds of all ways, and what a round of subnets touches and sends."""
    ways, rounds = [], []
    for ranks in (2, MANY):
        for way in WAYS:
            runs = kept(results, way, ranks)
            if not runs:
                continue
            sent = mean_interval([sent_bytes(run) for run in runs]).mean
            ratio, reached, number = against_replicas(results, way, ranks)
            ways.append(
                (
                    f"{way}, {ranks} ranks",
                    shown(of_seeds(by_seed(runs, lambda run: best(run)[0])), percent),
                    shown(results.mean(label_of(way, ranks), "test_accuracy"), percent),
                    megabytes(sent),
                    f"{shown(ratio, percent)}, {reached} of {number}" if reached else f"never, 0 of {number}",
                    *(seconds(sent / ranks * 8 / bits_per_second(rate)) for rate in NETWORKS.values()),
                    shown(mean_interval([run.summary["cpu_seconds"] for run in runs if run.summary]), seconds),
                )
            )
            if way.startswith("subnets"):
                rounds.append(round_of(runs[0], f"{way}, {ranks} ranks"))
    found = []
    if ways:
        columns = (
            "Run",
            "Best accuracy",
            "Last accuracy",
            "Sent by all ranks",
            "Of the replicas' bytes, until their best",
            *(f"Model: bytes at {name}" for name in NETWORKS),
            "Processor, rank 0",
        )
        found.append(Table(title="A perceptron by bytes", columns=columns, rows=tuple(ways)))
    if rounds:
        columns = ("Run", "First matrix", "Between hidden layers", "Last matrix", "Sent", "As predicted")
        found.append(Table(title="What a round of subnets touches", columns=columns, rows=tuple(rounds)))
    return found


def round_of(run: Run, name: str) -> tuple[str, ...]:
    """Return the share of each matrix that a round trains, and bytes beside the formula."""
    told = (run.summary or {})["subnets"]
    matrices = ("hidden1.linear.weight", "hidden2.linear.weight", "head.linear.weight")
    sent = {lane: int(told["wire_bytes"][lane]) for lane in ("dealt", "returned")}
    fits = "yes" if sent == predicted_bytes(run) else "NO"
    return (name, *(percent(told["touched"][each]) for each in matrices), megabytes(sum(sent.values())), fits)


def drawings(results: Results) -> list[Drawing]:
    """Return accuracy against bytes on two ranks, all epochs of a way a line."""
    ways = [way for way in WAYS if kept(results, way, 2) and not way.endswith(f"-{ROUNDS[-1]}")]
    if not ways:
        return []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(FIGURE_WIDTH, 0.85 * FIGURE_WIDTH), layout="constrained")
        axes = figure.add_subplot()
        for way in ways:
            runs = kept(results, way, 2)
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
    caption = (
        "Best test accuracy so far of a perceptron on two ranks against the bytes that all ranks have sent; rounds of "
        f"{ROUNDS[-1]} steps are in the table."
    )
    return [Drawing(name="perceptron-bytes", caption=caption, figure=figure)]
