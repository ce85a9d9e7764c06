"""Training time of a comparison's runs: their steps, each at what it costs on an idle machine.

Solving a head and what goes with it is not made of such steps; those runs keep the time that the clock has shown.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from analysis.parts.peers_labels import PROBE_EPOCHS, cell_of
from analysis.sweeps.results import Results
from analysis.sweeps.rows import Row

Costs = Mapping[str, Mapping[str, float]]
"""Ranks and batch -> kind of step -> seconds."""
DEEPEST = 5
"""The cut below the head."""
SOLVED = ("exact", "auto")
"""The peers that solve a head."""


def file_of(root: Path, image_size: int) -> Path:
    """Return where the costs at an image size are kept."""
    return root / "step_costs" / f"{image_size}px.json"


def read_costs(root: Path, image_size: int) -> Costs:
    """Return the kept costs of steps, their medians; none where there are none."""
    path = file_of(root, image_size)
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"seconds": {}}
    return {
        name: {kind: statistics.median(values) for kind, values in kinds.items()}
        for name, kinds in kept["seconds"].items()
    }


def timed(results: Results) -> Results:
    """Return the results with the training times that steps make; rows without known costs stay as they are."""
    known: dict[int, Costs] = {}
    rows = []
    for row in results.rows:
        size = row.get("image_size") or 0
        costs = known.setdefault(size, read_costs(results.directory.parent, size))
        seconds = seconds_of(row, costs)
        rows.append(row if seconds is None else {**row, "train_seconds": seconds})
    return replace(results, rows=rows)


def seconds_of(row: Row, costs: Costs) -> float | None:
    """Return a run's training time, None where its steps have no known costs."""
    of_ranks = costs.get(f"{row['ranks']} ranks, batches of {row['batch_size']}") if costs else None
    if of_ranks is None or cell_of(row["label"]).peer in SOLVED:
        return None
    return sum(steps * of_ranks[kind] for kind, steps in steps_of(row))


def steps_of(row: Row) -> Iterator[tuple[str, float]]:
    """Yield kinds of steps and how many of each a run has made."""
    steps, epoch = row["steps"], row["steps"] / row["epochs"]
    cut = row["final_cut"]
    if row["program"] == "analysis.ddp":
        yield "ddp", steps
    elif row["program"] == "analysis.lp_ft":
        probing = PROBE_EPOCHS * epoch
        yield from cached_steps(DEEPEST, steps=probing, filling=2 * epoch)
        yield "live0", steps - probing
    elif row["cache"] == "on":
        views = int(str(row["augment"]).partition(":")[2] or 1)
        yield from cached_steps(cut, steps=steps, filling=min(steps, views * epoch))
    else:
        moves = [tuple(map(int, move.split("@"))) for move in row["cut_history"].split()]
        for (cut, start), (_, stop) in pairwise([*moves, (0, steps)]):
            yield f"live{cut}", stop - start


def cached_steps(cut: int, *, steps: float, filling: float) -> Iterator[tuple[str, float]]:
    """Yield the steps of a run that reads what its first epochs, `filling` steps, have computed."""
    yield f"live{cut}", filling
    yield f"cached{cut}", steps - filling
