"""Pipeline parallelism over ranks: the runs, compared with the bounds of the paper.

P partitions that take equal time, with M micro-batches: at most P M / (M + P - 1) as fast as one rank. Gradients cross
between replicas only, activations and errors between partitions only, so bytes are known beforehand.
Source: Awan et al., "HyPar-Flow", ISC 2020, arXiv 1911.05146.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, paired_ratio, shown
from hvfreeze.model.blocks import Chain, cut_into_blocks
from hvfreeze.model.model_sources import build_model
from hvfreeze.report.tables import Table, factor, megabytes
from hvfreeze.runs.reading import Run
from hvfreeze.strategies.model_parallel import dry_run

MODEL = "resnet20"
BATCH = 64
SHAPES = ((1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8), (2, 1, 1), (2, 1, 2), (2, 1, 4), (2, 1, 8), (4, 1, 1), (4, 1, 4))
SHAPES_OF_SEVERAL = ((4, 1, 8), (1, 2, 1), (2, 2, 4), (1, 4, 1))
"""Partitions, replicas, micro-batches."""
FROZEN = 5
"""Blocks of resnet20 that are frozen in one run: half of them."""
LINK = "1gbit"
DEEP, WIDE = "resnet110", "resnet18"
SMALL_BATCH = 8
"""Batch size of all ranks together on the cluster, which makes gradients large compared with activations."""


def planned(preset: Preset) -> list[PlannedRun]:
    """Return the runs on this machine; their learning rate and accuracy do not matter here."""
    shapes = ((1, 1, 2), (2, 1, 2)) if preset.is_smoke else (*SHAPES, *SHAPES_OF_SEVERAL)
    runs = [run(preset, shape, seed=0) for shape in shapes]
    if not preset.is_smoke:
        frozen: dict[str, Value] = {"freeze": "static", "cut": FROZEN}
        runs.append(run(preset, (2, 1, 8), seed=0, more="-frozen", changes=frozen))
    return runs


def planned_on_nodes(preset: Preset) -> list[PlannedRun]:
    """Return the runs on two nodes of the local cluster: each model cut in two, and as two replicas."""
    if preset.is_smoke:
        return []
    runs = []
    for model in (DEEP, WIDE):
        common: dict[str, Value] = {"model": model, "train_samples": 24 * SMALL_BATCH * 8 // 7}
        cut: dict[str, Value] = {**common, "batch_size": SMALL_BATCH}
        copies: dict[str, Value] = {**common, "batch_size": SMALL_BATCH // 2}
        runs.append(run(preset, (2, 1, 2), seed=0, more=f"-{model}", changes=cut, nodes=2))
        runs.append(run(preset, (1, 2, 1), seed=0, more=f"-{model}", changes=copies, nodes=2))
    return runs


def run(
    preset: Preset,
    shape: tuple[int, int, int],
    *,
    seed: int,
    more: str = "",
    changes: dict[str, Value] | None = None,
    nodes: int = 0,
) -> PlannedRun:
    """Return a run of the grid's part of the experiment."""
    parts, replicas, number = shape
    flags: dict[str, Value] = {
        **{key: value for key, value in preset.common().items() if key != "weights"},
        "strategy": "grid",
        "model": MODEL,
        "parts": parts,
        "replicas": replicas,
        "micro_batches": number,
        "image_size": 32,
        "batch_size": 8 if preset.is_smoke else BATCH,
        "train_samples": 64 if preset.is_smoke else 8 * BATCH * replicas * 8 // 7,
        "validation_fraction": 0.125,
        "evaluate_every": 2,
        "epochs": 2,
        "schedule": "constant",
        "checkpoint_every": "0",
    }
    label = f"grid-{parts}x{replicas}-m{number}{more}"
    flags |= changes or {}
    bandwidth = LINK if nodes else ""
    return PlannedRun(label=label, seed=seed, flags=flags, ranks=parts * replicas, nodes=nodes, bandwidth=bandwidth)


def chain_of(run: Run, *, scheme: str = "residual") -> Chain:
    """Return the chain that a run has trained, with other weights."""
    with torch.random.fork_rng(devices=[]):
        model = build_model(run.settings["model"], num_classes=10, image_size=run.settings["image_size"]).model
        return cut_into_blocks(model, scheme=scheme)


def image_of(run: Run) -> Tensor:
    """Return a black image of the size that a run has, (1, 3, H, W)."""
    return torch.zeros(1, 3, run.settings["image_size"], run.settings["image_size"])


def grid_of(run: Run) -> dict[str, Any]:
    """Return what a run's summary tells of its grid."""
    found: dict[str, Any] = (run.summary or {})["grid"]
    return found


def throughput_ratio(results: Results, label: str, reference: str) -> Interval:
    """Return samples a second of a label over those of another, after the first epoch, paired by seed."""

    def speeds(of: str) -> dict[int, float]:
        samples = results.of_runs(of, lambda run: run.settings["batch_size"] * grid_of(run)["replicas"])
        return {seed: samples[seed] / spent for seed, spent in results.values(of, "step_seconds").items()}

    return paired_ratio(speeds(label), speeds(reference))


def bound(parts: int, replicas: int, number: int) -> float:
    """Return how many times as fast as one rank a grid can be, with equal partitions and a core for every rank."""
    return replicas * parts * number / (number + parts - 1)


def predicted_bytes(run: Run) -> tuple[int, int, int]:
    """Return the bytes of activations, errors and gradients that all ranks together send, by the formula."""
    settings, grid = run.settings, grid_of(run)
    chain = chain_of(run)
    chain.model.eval()
    boundaries = dry_run(chain.run, image_of(run), depth=len(chain.blocks))
    steps, cut = run.metrics[-1]["step"], settings["cut"] or 0
    inner = [start for start, _ in grid["segments"][1:]]
    lines = steps * grid["replicas"]
    samples = lines * settings["batch_size"]
    trained = sum(parameter.nbytes for _, parameter in chain.named_parameters(cut))
    return (
        samples * sum(boundaries[depth].num_bytes for depth in inner),
        samples * sum(boundaries[depth].num_bytes for depth in inner if depth > cut),
        lines * trained if grid["replicas"] > 1 else 0,
    )


def measured_bytes(run: Run) -> tuple[int, int, int]:
    """Return the same as the program counted it."""
    grid = grid_of(run)
    return grid["wire_bytes"]["activations"], grid["wire_bytes"]["errors"], sum(grid["allreduce_bytes"])


def tables(results: Results) -> tuple[str, str]:
    """Return speed and bound, and memory and bytes, of every shape."""
    speed: list[tuple[str, ...]] = []
    memory: list[tuple[str, ...]] = []
    for label in (label for label in results.labels if label.startswith("grid-")):
        run = results.runs_of(label)[0]
        grid = grid_of(run)
        shape = grid["parts"], grid["replicas"], grid["micro_batches"]
        if "-resnet" not in label:
            same = f"grid-1x1-m{shape[2]}"
            gains = (throughput_ratio(results, label, other) for other in ("grid-1x1-m1", same))
            crowded = shape[0] * shape[1] > run.environment["cores"]
            note = " (more ranks than cores)" if crowded else ""
            speed.append((f"{label}{note}", *(shown(gain, factor) for gain in gains), factor(bound(*shape))))
        fits = "yes" if measured_bytes(run) == predicted_bytes(run) else "NO"
        held = [a + b for a, b in zip(grid["parameter_bytes"], grid["optimizer_bytes"], strict=True)]
        by_rank = (" ".join(map(megabytes, each)) for each in (held, grid["peak_memory_bytes"]))
        memory.append((label, *by_rank, *map(megabytes, measured_bytes(run)), fits))
    speeds = ("Run", "Over one rank", "Over one rank, as many micro-batches", "Bound")
    sizes = ("Run", "Parameters, optimizer by rank", "Peak memory by rank", "Activations", "Errors", "Gradients")
    return (
        Table(columns=speeds, rows=tuple(speed)).to_text(),
        Table(columns=(*sizes, "As predicted"), rows=tuple(memory)).to_text(),
    )


def words(results: Results) -> Words:
    speed, memory = tables(results)
    return {
        "gain": lambda ours, theirs: throughput_ratio(results, f"grid-{ours}", f"grid-{theirs}"),
        "bound": bound,
        "speed": speed,
        "memory": memory,
    }
