"""The evaluation of `analysis.peers`: names, learning rates, training times, and comparison with the front.

Training time is the sum of a run's steps, each at its cost on an idle machine, where RESULTS/step_costs has it. Fitting
a head does not consist of such steps; these runs keep their measured time.

A cost is the median of a few timed steps, the same for all seeds, so that the spread of seeds does not show its error:
rounds of steps are drawn again, and what that changes is joined to the spread of seeds.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from analysis.sweeps.charts import FULL, Way, ways_chart
from analysis.sweeps.kept import Row
from analysis.sweeps.results import BY_STEPS, Metric, Results, with_front
from analysis.sweeps.statistics import Interval, joined
from hvfreeze.report.tables import megabytes

PROBE_EPOCHS, PROBE_VIEWS = 10, 2
"""Epochs and views of the linear probing before full fine-tuning, in kept runs; most epochs read the cache."""
NEAR = 0.01
"""Less than the standard error of an accuracy on a thousand held-out samples."""
SLACK = 0.005
"""Half a point: who is as near as this to the best of full fine-tuning has reached it."""
TIMED = "resnet18"
"""The model whose steps were timed."""
DEEPEST = 5
"""The cut below the head."""
SOLVED = ("auto", "auto-one-view", "exact")
"""The peers that fit a head."""
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
    "exact": "linear head, fitted",
    "auto": "hvfreeze auto",
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

DRAWS = 1000
"""How often rounds of timed steps are drawn again."""
Timings = Mapping[str, Mapping[str, Sequence[float]]]
"""Ranks and batch -> kind of step -> the seconds of each round."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A way of fine-tuning on so many samples for a budget of epochs."""

    samples: int
    peer: str
    epochs: int

    @property
    def label(self) -> str:
        """Label of its runs."""
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


def read_timings(root: Path, image_size: int) -> Timings:
    """Return the kept seconds of steps; none where there are none."""
    path = root / "step_costs" / f"{image_size}px.json"
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"seconds": {}}
    timings: Timings = kept["seconds"]
    return timings


@dataclass(frozen=True)
class Timed(Results):
    """Results whose intervals of training times have the error of what a step costs too.

    A row that is timed by steps has its time by the costs of each draw in `train_draws`, (DRAWS,).
    """

    def mean(self, label: str, column: str) -> Interval:
        """Return the mean of a column with its interval."""
        return self._joined(super().mean(label, column), column, lambda: self._drawn(label).mean(axis=0))

    def ratio(self, label: str, against: str = "", column: str = "train_seconds") -> Interval:
        """Return the reference's time over this label's, paired by seed and by draw."""
        reference = against or self.reference

        def ratios() -> NDArray[np.float64]:
            both = [seed for seed in self.values(reference, column) if seed in self.values(label, column)]
            logs = np.log(self._drawn(reference, both)) - np.log(self._drawn(label, both))
            return np.asarray(np.exp(logs.mean(axis=0)))

        return self._joined(super().ratio(label, reference, column), column, ratios, as_ratio=True)

    def _joined(
        self, interval: Interval, column: str, drawn: Callable[[], NDArray[np.float64]], *, as_ratio: bool = False
    ) -> Interval:
        if column != "train_seconds" or interval.n < 2:
            return interval
        low, high = np.quantile(drawn(), (0.025, 0.975))
        return joined(interval, float(low), float(high), as_ratio=as_ratio)

    def _drawn(self, label: str, seeds: Sequence[int] | None = None) -> NDArray[np.float64]:
        """Return the seconds of a label's runs by every draw, (seeds, DRAWS); the clock's are the same in all."""
        rows = {int(row["seed"]): row for row in self.of(label)}
        chosen = rows.values() if seeds is None else [rows[seed] for seed in seeds]
        found = [row.get("train_draws", np.full(DRAWS, row["train_seconds"])) for row in chosen]
        return np.array(found, dtype=np.float64)


def timed(results: Results) -> Timed:
    """Return the results with the training times that steps make; rows without known costs stay as they are."""
    sizes = {row.get("image_size") or 0 for row in results.rows}
    known = {size: read_timings(results.directory.parent, size) for size in sizes}
    medians = {
        (size, name): {kind: statistics.median(rounds) for kind, rounds in kinds.items()}
        for size, timings in known.items()
        for name, kinds in timings.items()
    }
    draws = {(size, name): drawn(kinds) for size, timings in known.items() for name, kinds in timings.items()}
    rows = []
    for row in results.rows:
        key = (row.get("image_size") or 0, f"{row['ranks']} ranks, batches of {row['batch_size']}")
        steps = steps_of(row) if key in medians else None
        if steps is not None:
            row = {**row, "train_seconds": summed(steps, medians[key]), "timed_by": BY_STEPS}
            row["train_draws"] = sum(count * draws[key][kind] for kind, count in steps.items())
        rows.append(row)
    return Timed(results.directory, rows, results.front, results.fronts, reference=results.reference)


def drawn(kinds: Mapping[str, Sequence[float]]) -> dict[str, NDArray[np.float64]]:
    """Return the median of each kind of step in each of DRAWS bootstrap samples of the rounds, (DRAWS,) each.

    All kinds take their turn in a round, so that a sample has the same rounds of all.
    """
    count = min(map(len, kinds.values()))
    chosen = np.random.default_rng(0).integers(count, size=(DRAWS, count))
    return {kind: np.median(np.asarray(rounds)[chosen], axis=1) for kind, rounds in kinds.items()}


def summed(steps: Mapping[str, int], kinds: Mapping[str, float]) -> float:
    """Return the seconds of so many steps of each kind."""
    return sum(count * kinds[kind] for kind, count in steps.items())


def steps_of(row: Row) -> Counter[str] | None:
    """Return how many steps of each kind make up a run, fewer than none where they are to be taken off.

    None where a run is not made of such steps.
    """
    if row.get("model", TIMED) != TIMED or cell_of(row["label"]).peer in SOLVED:
        return None
    probing_epochs = PROBE_EPOCHS if row["program"] == "analysis.lp_ft" else 0
    # A row has the configured epochs, and all steps that were made.
    steps, epoch = int(row["steps"]), int(row["steps"]) // (int(row["epochs"]) + probing_epochs)
    if row["program"] == "analysis.ddp":
        return Counter({"ddp": steps})
    if probing_epochs:
        probing = probing_epochs * epoch
        found = stored_steps([DEEPEST] * probing, again=PROBE_VIEWS * epoch)
        found["live0"] += steps - probing
        return found
    cuts = list(cuts_of(str(row["cut_history"]), steps=steps))
    if row["cache"] != "on":
        return Counter(f"live{cut}" for cut in cuts)
    views = int(str(row["augment"]).partition(":")[2] or 1)
    return stored_steps(cuts, again=views * epoch)


def cuts_of(history: str, *, steps: int) -> Iterator[int]:
    """Yield the cut in each step; `history` is a row's, as in `0@0 2@40`."""
    moves = [tuple(map(int, move.split("@"))) for move in history.split()]
    for (cut, start), (_, stop) in pairwise([*moves, (0, steps)]):
        yield from [cut] * (stop - start)


def stored_steps(cuts: Sequence[int], *, again: int) -> Counter[str]:
    """Return how many steps of each kind are made where rows are stored, and come again `again` steps after.

    A row is computed from what was stored of it then, so that only the blocks between the two cuts are run.
    """
    found: Counter[str] = Counter()
    for step, cut in enumerate(cuts):
        stored = min(cuts[step - again] if step >= again else 0, cut)
        found[f"live{cut}"] += 1
        if stored:
            found[f"live{stored}"] -= 1
            found[f"cached{stored}"] += 1
    return found


def in_words(label: str) -> str:
    """Return what a label's runs are, as the figure has it."""
    cell = cell_of(label)
    if cell.peer == "auto":
        return f"{WORDS[cell.peer]} --epochs {cell.epochs}"
    if cell.peer in SOLVED and cell.epochs == 1:
        return WORDS[cell.peer]
    return f"{WORDS.get(cell.peer, cell.peer)}, {cell.epochs} epoch{'' if cell.epochs == 1 else 's'}"


def by_samples(results: Results) -> list[tuple[int, Results]]:
    """Return for each number of samples its tested rows, held against full fine-tuning on as many."""
    results, found = timed(results), []
    tested = [row for row in results.rows if not row["validation_fraction"]]
    for samples in sorted({cell_of(str(row["label"])).samples for row in tested}):
        own = replace(results, rows=[row for row in tested if cell_of(str(row["label"])).samples == samples])
        full = sorted((label for label in own.labels if cell_of(label).peer == "full"), key=lambda b: cell_of(b).epochs)
        if full:
            found.append((samples, with_front(replace(own, reference=full[-1]), own, full)))
    return found


def best_full(results: Results) -> str:
    """Return the label of full fine-tuning that is the most accurate on average."""
    return results.most_accurate(label for label in results.labels if cell_of(label).peer == "full")


def shortest(results: Results, *, full: bool) -> str | None:
    """Return the label that reaches the best of full fine-tuning, less half a point, in the shortest mean time."""
    wanted = results.mean(best_full(results), "test_accuracy").mean - SLACK
    there = [
        label
        for label in results.labels
        if results.mean(label, "test_accuracy").mean >= wanted and (cell_of(label).peer == "full") is full
    ]
    return min(there, key=lambda label: results.mean(label, "train_seconds").mean, default=None)


def ahead(results: Results) -> list[str]:
    """Return the ways that are surely ahead of full fine-tuning trained for as many seconds, with their lead."""
    others = (label for label in results.labels if cell_of(label).peer != "full")
    return [f"{in_words(label)} {results.lead(label)}" for label in others if results.over_front(label).low > 0]


COLUMNS = (
    Metric("Learning rate", lambda r, label, _: f"{r.of(label)[0]['lr']:g}"),
    "time",
    "accuracy+n",
    Metric("Full, equal duration", lambda r, label, _: "" if cell_of(label).peer == "full" else r.lead(label)),
    Metric("Gradients", lambda r, label, _: megabytes(r.mean(label, "allreduce_bytes").mean)),
    Metric("Stored", lambda r, label, _: megabytes(stored.mean) if (stored := r.mean(label, "cache_bytes")).n else ""),
)
"""Columns of a page's tables."""


def drawings_of(results: Results) -> dict[str, Figure]:
    """Return accuracy against time, a panel for each number of samples."""
    panels = {f"{samples} training samples": ways_of(own) for samples, own in by_samples(results)}
    every = {way.label for ways in panels.values() for way in ways}
    drawn = {}
    for name, peers in FIGURES.items():
        wanted = every if len(every) <= MOST_WAYS else every & {method_of_peer(peer) for peer in peers}
        chosen = {title: [way for way in ways if way.label in wanted] for title, ways in panels.items()}
        ours = [method_of_peer(peer) for peer in SOLVED if method_of_peer(peer) in wanted]
        drawn[name] = ways_chart(chosen, reference=FULL, ours=ours)
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
