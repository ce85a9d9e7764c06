"""Ranks of a grid whose blocks are frozen or cached: reassigned or idle. The runs and their evaluation.

A block that trains takes a forward pass and a backward pass of twice the time, one that is frozen a forward pass, one
that is cached nothing. A line of P ranks takes the time of its slowest, M + P - 1 times for M micro-batches; ranks that
have nothing to do count for nothing. Lines that share a batch have each their part of M.
Source: He et al., "PipeTransformer", ICML 2021, arXiv 2102.03161.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis.parts.strategies.grid_runs import chain_of, grid_of, image_of, run, throughput_ratio
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, shown
from hvfreeze.model.segments import Segment, work_of
from hvfreeze.report.tables import Table, factor, megabytes
from hvfreeze.runs.reading import Run

CUT = 5
"""Blocks of resnet20 that are frozen: all of the first partition, which is cut there."""
KINDS = {"frozen": "off", "cached": "on"}
"""Kinds of frozen blocks -> --cache."""


def planned(preset: Preset) -> list[PlannedRun]:
    """Return the runs: each kind with idle ranks, and with repartitioning."""
    shape = (2, 1, 2) if preset.is_smoke else (2, 1, 8)
    runs = []
    for kind, cache in KINDS.items():
        for redeal in ("off", "on"):
            changes: dict[str, Value] = {"freeze": "static", "cut": CUT, "cut_by": "given", "cut_at": str(CUT)}
            changes |= {"cache": cache, "redeal": redeal, "augment": "none", "evaluate_every": 3, "epochs": 3}
            made = run(preset, shape, seed=0, changes=changes)
            runs.append(PlannedRun(label=label_of(kind, redeal), seed=0, flags=made.flags, ranks=made.ranks))
    return runs


def label_of(kind: str, redeal: str) -> str:
    """Return what a run is called."""
    return f"{kind}-{'redealt' if redeal == 'on' else 'waiting'}"


def step_work(
    work: Sequence[float], segments: Sequence[Segment], *, cut: int, cached: bool, micro_batches: int
) -> float:
    """Return how long a line's step takes, in forward passes' operations of a micro-batch.

    Args:
        work: of each block's forward pass.
        segments: by partition.
        cut: frozen blocks.
        cached: whether they cost nothing.
        micro_batches: that go through this line.
    """
    each = [0.0 if cached and block < cut else one * (1 if block < cut else 3) for block, one in enumerate(work)]
    parts = [sum(each[start:stop]) for start, stop in segments]
    working = sum(part > 0 for part in parts)
    return max(parts) * (micro_batches + working - 1)


def predicted_gain(waiting: Run, redealt: Run) -> float:
    """Return the predicted speed-up of a step by repartitioning, with a core for each rank."""
    takes = []
    work = [float(number) for number in work_of(chain_of(waiting), image_of(waiting))]
    for one in (waiting, redealt):
        grid, deal = grid_of(one), grid_of(one)["deals"][-1]
        lines = deal["replicas"] // grid["replicas"]
        takes.append(
            step_work(
                work,
                deal["segments"],
                cut=one.settings["cut"],
                cached=one.settings["cache"] == "on",
                micro_batches=grid["micro_batches"] // lines,
            )
        )
    return takes[0] / takes[1]


def gain(results: Results, kind: str) -> Interval:
    """Return the measured speed-up of a step by repartitioning."""
    return throughput_ratio(results, label_of(kind, "on"), label_of(kind, "off"))


def predicted(results: Results, kind: str) -> str:
    """Return the same as it should be."""
    (waiting,), (redealt,) = (results.runs_of(label_of(kind, redeal)) for redeal in ("off", "on"))
    return factor(predicted_gain(waiting, redealt))


def table(results: Results) -> str:
    """Return measured and predicted speed, and the bytes sent."""
    rows = []
    for kind in KINDS:
        for redeal in ("off", "on"):
            label = label_of(kind, redeal)
            told = (shown(gain(results, kind), factor), predicted(results, kind)) if redeal == "on" else ("", "")
            grid = grid_of(results.runs_of(label)[0])
            sent = (grid["wire_bytes"]["activations"], sum(grid["allreduce_bytes"]), grid["moved_bytes"])
            lines = " then ".join(f"{deal['replicas']} x {deal['parts']}" for deal in grid["deals"])
            rows.append((label, lines, *told, *map(megabytes, sent)))
    columns = ("Run", "Lines x ranks", "Over ranks that wait", "Predicted", "Activations", "Gradients", "Blocks moved")
    return Table(columns=columns, rows=tuple(rows)).to_text()


def words(results: Results) -> Words:
    return {
        "gain": lambda kind: gain(results, kind),
        "predicted": lambda kind: predicted(results, kind),
        "table": table(results),
    }
