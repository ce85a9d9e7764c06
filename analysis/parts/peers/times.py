"""Training time of a comparison's runs: their steps, each at what it costs on an idle machine.

Solving a head and what goes with it is not made of such steps; those runs keep the time that the clock has shown.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from analysis.parts.peers.labels import PROBE_EPOCHS, PROBE_VIEWS, cell_of
from analysis.sweeps.results import Results
from analysis.sweeps.rows import Row

Costs = Mapping[str, Mapping[str, float]]
"""Ranks and batch -> kind of step -> seconds."""
TIMED = "resnet18"
"""The model whose steps `analysis.step_costs` has timed."""
DEEPEST = 5
"""The cut below the head."""
SOLVED = ("exact", "auto", "auto-one-view")
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
    kinds = costs.get(f"{row['ranks']} ranks, batches of {row['batch_size']}") if costs else None
    if kinds is None or row.get("model", TIMED) != TIMED or cell_of(row["label"]).peer in SOLVED:
        return None
    probing_epochs = PROBE_EPOCHS if row["program"] == "analysis.lp_ft" else 0
    # A row's epochs are those that were asked for, its steps all that were made.
    steps, epoch = int(row["steps"]), int(row["steps"]) // (int(row["epochs"]) + probing_epochs)
    if row["program"] == "analysis.ddp":
        return steps * kinds["ddp"]
    if probing_epochs:
        probing = probing_epochs * epoch
        probed = sum(stored_steps([DEEPEST] * probing, kinds, again=PROBE_VIEWS * epoch))
        return probed + float(steps - probing) * kinds["live0"]
    cuts = list(cuts_of(str(row["cut_history"]), steps=steps))
    if row["cache"] != "on":
        return sum(kinds[f"live{cut}"] for cut in cuts)
    views = int(str(row["augment"]).partition(":")[2] or 1)
    return sum(stored_steps(cuts, kinds, again=views * epoch))


def cuts_of(history: str, *, steps: int) -> Iterator[int]:
    """Yield the cut in each step; `history` is a row's, as in `0@0 2@40`."""
    moves = [tuple(map(int, move.split("@"))) for move in history.split()]
    for (cut, start), (_, stop) in pairwise([*moves, (0, steps)]):
        yield from [cut] * (stop - start)


def stored_steps(cuts: Sequence[int], kinds: Mapping[str, float], *, again: int) -> Iterator[float]:
    """Yield the seconds of each step where rows are stored, and come again `again` steps after.

    A row is computed from what was stored of it then, so that only the blocks between the two cuts are run.
    """

    def prefix(cut: int) -> float:
        return kinds[f"live{cut}"] - kinds[f"cached{cut}"] if cut else 0.0

    for step, cut in enumerate(cuts):
        before = cuts[step - again] if step >= again else 0
        yield kinds[f"live{cut}"] - prefix(min(before, cut))
