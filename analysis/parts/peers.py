"""What is made of the rows of `analysis.peers`: names, learning rates, training times, and who is ahead of the front.

Training time is the sum of a run's steps, each at its cost on an idle machine (analysis.step_costs). Solving a head and
what goes with it is not made of such steps; those runs keep the time that the clock has shown.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from analysis.sweeps.charts import FULL, Way, ways_chart
from analysis.sweeps.experiment import Answer, Drawing
from analysis.sweeps.kept import Row
from analysis.sweeps.results import BY_STEPS, Results, with_front
from analysis.sweeps.statistics import is_below
from hvfreeze.report.tables import Table, megabytes

PROBE_EPOCHS, PROBE_VIEWS = 10, 2
"""Of linear probing; all epochs but the first two read the cache, and cost next to nothing."""
NEAR = 0.01
"""Less than the standard error of an accuracy on a thousand held-out samples."""
SLACK = 0.005
"""Half a point: who is as near as this to the best of full fine-tuning has reached it."""
TIMED = "resnet18"
"""The model whose steps `analysis.step_costs` has timed."""
DEEPEST = 5
"""The cut below the head."""
SOLVED = ("auto", "auto-one-view", "exact")
"""The peers that solve a head."""
LABEL = re.compile(r"(?:lr(?P<lr>[^-]+)-)?n(?P<samples>\d+)-(?P<peer>.+)-e(?P<epochs>\d+)")
WORDS = {
    "full": "full fine-tuning",
    "ddp": "full, by DDP over gloo",
    "smoothed": "full, labels smoothed",
    "last-stage": "last stage and head",
    "last-stage-cached": "last stage, cached",
    "head-cached": "head, cached",
    "lp-ft": "head, then full (LP-FT)",
    "voted": "frozen by vote",
    "autofreeze": "AutoFreeze, cached",
    "pipetransformer": "PipeTransformer, cached",
    "composer": "Composer's freezing",
    "exact": "linear head, solved",
    "auto": "--freeze auto",
    "auto-one-view": "auto, --mirror off",
}
"""Ways as a reader of a figure knows them."""

METHODS = {
    "ddp": "DDP",
    "smoothed": "labels smoothed",
    "last-stage": "frozen from the start",
    "last-stage-cached": "frozen and cached",
    "voted": "gradient-norm",
    "autofreeze": "AutoFreeze",
    "pipetransformer": "PipeTransformer",
}
"""Ways as figures of all experiments call them, where that is not as here."""
FIGURES = {
    "front": ("full", "auto", "auto-one-view", "exact", "last-stage-cached", "voted"),
    "published": ("full", "auto", "lp-ft", "autofreeze", "pipetransformer", "composer"),
    "others": ("full", "auto", "ddp", "smoothed", "last-stage", "head-cached"),
}
MOST_WAYS = 6
"""In one figure; where there are more, `FIGURES` says which are drawn together."""

Costs = Mapping[str, Mapping[str, float]]
"""Ranks and batch -> kind of step -> seconds."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A way of fine-tuning on so many samples for a budget of epochs."""

    samples: int
    peer: str
    epochs: int

    @property
    def label(self) -> str:
        """What its runs are called."""
        return f"n{self.samples}-{self.peer}-e{self.epochs}"


def cell_of(label: str) -> Cell:
    """Return the cell that a label is about."""
    match = LABEL.fullmatch(label)
    if match is None:
        raise ValueError(f"label ({label}) must look like n5000-full-e4")
    return Cell(samples=int(match["samples"]), peer=match["peer"], epochs=int(match["epochs"]))


def best_rates(rows: Sequence[Row], known: Mapping[Cell, float] = MappingProxyType({})) -> dict[Cell, float]:
    """Return the learning rate of every cell that was best on held-out samples, of equals the largest.

    Args:
        rows: of an experiment; cells without tries are left out.
        known: rates of elsewhere, which are kept where no other is better by more than NEAR.
    """
    tried: dict[Cell, dict[float, float]] = {}
    for row in rows:
        if row["validation_fraction"]:
            tried.setdefault(cell_of(str(row["label"])), {})[float(row["lr"])] = float(row["test_accuracy"])
    found = {}
    for cell, accuracies in tried.items():
        best, held = max(accuracies, key=lambda lr: (accuracies[lr], lr)), known.get(cell)
        near = held is not None and accuracies.get(held, 0.0) >= accuracies[best] - NEAR
        found[cell] = held if near and held is not None else best
    return found


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
    sizes = {row.get("image_size") or 0 for row in results.rows}
    known = {size: read_costs(results.directory.parent, size) for size in sizes}
    rows = []
    for row in results.rows:
        seconds = seconds_of(row, known[row.get("image_size") or 0])
        rows.append(row if seconds is None else {**row, "train_seconds": seconds, "timed_by": BY_STEPS})
    return replace(results, rows=rows)


def seconds_of(row: Row, costs: Costs) -> float | None:
    """Return a run's training time, None where its steps have no known costs."""
    kinds = costs.get(f"{row['ranks']} ranks, batches of {row['batch_size']}")
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
    for step, cut in enumerate(cuts):
        stored = min(cuts[step - again] if step >= again else 0, cut)
        yield kinds[f"live{cut}"] - (kinds[f"live{stored}"] - kinds[f"cached{stored}"] if stored else 0.0)


def in_words(label: str) -> str:
    """Return what a label's runs are, as the figure has it."""
    cell = cell_of(label)
    if cell.peer in SOLVED and cell.epochs == 1:
        return WORDS[cell.peer]
    return f"{WORDS.get(cell.peer, cell.peer)}, {cell.epochs} epoch{'' if cell.epochs == 1 else 's'}"


def by_samples(results: Results) -> list[tuple[int, Results]]:
    """Return for each number of samples its tested rows, held against full fine-tuning on as many."""
    tested = [row for row in timed(results).rows if not row["validation_fraction"]]
    found = []
    for samples in sorted({cell_of(str(row["label"])).samples for row in tested}):
        own = replace(results, rows=[row for row in tested if cell_of(str(row["label"])).samples == samples])
        full = sorted((label for label in own.labels if cell_of(label).peer == "full"), key=lambda b: cell_of(b).epochs)
        if full:
            found.append((samples, with_front(replace(own, reference=full[-1]), own, full)))
    return found


def best_full(results: Results) -> str:
    """Return the label of full fine-tuning that is the most accurate on average."""
    full = [label for label in results.labels if cell_of(label).peer == "full"]
    return max(full, key=lambda label: results.mean(label, "test_accuracy").mean)


def shortest(results: Results, *, full: bool) -> str | None:
    """Return the label that reaches the best of full fine-tuning, less half a point, in the shortest mean time."""
    wanted = results.mean(best_full(results), "test_accuracy").mean - SLACK
    there = [
        label
        for label in results.labels
        if results.mean(label, "test_accuracy").mean >= wanted and (cell_of(label).peer == "full") is full
    ]
    return min(there, key=lambda label: results.mean(label, "train_seconds").mean, default=None)


def answers_of(results: Results) -> list[Answer]:
    """Return for each number of samples how soon the best of full fine-tuning is reached, and by whom."""
    found = []
    for samples, own in by_samples(results):
        best, plain, other = best_full(own), shortest(own, full=True) or best_full(own), shortest(own, full=False)
        text = "No other way comes within half a point of full fine-tuning's best."
        if other is not None:
            text = (
                f"{in_words(other)} comes within half a point of full fine-tuning's best "
                f"{own.gain_text(other, plain, count=True)} as fast."
            )
        ahead = [
            f"{in_words(label)} {own.lead_text(label)}"
            for label in own.labels
            if cell_of(label).peer != "full" and own.over_front(label).low > 0
        ]
        details = (
            (
                f"Full fine-tuning reaches {own.accuracy_text(best, count=True)} after {cell_of(best).epochs} epochs, "
                f"and comes within half a point of it after {own.time_text(plain)} ({cell_of(plain).epochs} epochs)."
            ),
            f"Ahead of full fine-tuning trained for as many seconds: {'; '.join(ahead) or 'none for sure'}.",
        )
        model, size = own.rows[0].get("model", TIMED), own.rows[0].get("image_size")
        question = f"Which way is the soonest as good as full fine-tuning, with {samples} samples"
        question += f" at {size} pixels" if size else ""
        question += "?" if model == TIMED else f" and {model}?"
        negative = other is None or is_below(own.gain(other, plain), 1)
        found.append(Answer(question, text, len(own.of(best)), negative=negative, details=details))
    return found


def tables_of(results: Results) -> list[Table]:
    """Return for each number of samples every way and budget: time, accuracy, lead over the front, bytes."""
    columns = ("Way", "Learning rate", "Training time", "Test accuracy", "Full, trained as long", "Gradients", "Stored")
    found = []
    for samples, own in by_samples(results):
        rows = tuple(
            (
                own.shown_as(label),
                f"{own.of(label)[0]['lr']:g}",
                own.time_text(label),
                own.accuracy_text(label, count=True),
                "" if cell_of(label).peer == "full" else own.lead_text(label),
                megabytes(own.mean(label, "allreduce_bytes").mean),
                megabytes(own.mean(label, "cache_bytes").mean) if own.mean(label, "cache_bytes").n else "",
            )
            for label in own.labels
        )
        found.append(Table(title=f"{samples} samples", columns=columns, rows=rows))
    return found


def drawings_of(results: Results) -> list[Drawing]:
    """Return accuracy against time, a panel for each number of samples."""
    found = by_samples(results)
    if not found:
        return []
    caption = (
        f"Accuracy against training time, a line from a way's smallest budget of epochs to its largest; mean and 95 % "
        f"interval, {results.count([label for _, own in found for label in own.labels])}."
    )
    panels = {f"{samples} training samples": ways_of(own) for samples, own in found}
    every = {way.label for ways in panels.values() for way in ways}
    drawn = []
    for name, peers in FIGURES.items():
        wanted = every if len(every) <= MOST_WAYS else every & {method_of_peer(peer) for peer in peers}
        chosen = {title: [way for way in ways if way.label in wanted] for title, ways in panels.items()}
        ours = [method_of_peer(peer) for peer in SOLVED if method_of_peer(peer) in wanted]
        drawn.append(Drawing(name, caption, ways_chart(chosen, reference=FULL, ours=ours)))
        if wanted == every:
            break
    return drawn


def method_of_peer(peer: str) -> str:
    """Return what figures call a way."""
    return METHODS.get(peer, WORDS.get(peer, peer))


def ways_of(results: Results) -> list[Way]:
    """Return each way with its budgets, the smallest first."""
    labels = sorted(results.labels, key=lambda label: cell_of(label).epochs)
    points = {label: (results.mean(label, "train_seconds"), results.mean(label, "test_accuracy")) for label in labels}
    return [
        Way(method_of_peer(peer), [points[label] for label in labels if cell_of(label).peer == peer])
        for peer in dict.fromkeys(cell_of(label).peer for label in results.labels)
    ]
