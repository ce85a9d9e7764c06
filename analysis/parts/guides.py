"""The variables of the generated parts of README.md and docs/."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from analysis import adaptive, caching, peers, pixels64, static_sweep
from analysis.parts.peers import TIMED, best_full, by_samples
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.kept import ENVIRONMENTS, RUNS, by_name, machine_of, read_lines
from analysis.sweeps.pages import Words, bare
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import verdict
from hvfreeze.report.tables import seconds

CHOICES: dict[Experiment, dict[str, str]] = {
    static_sweep.EXPERIMENT: {f"groups{cut}": f"{cut} of 7 groups frozen from the start" for cut in range(1, 7)},
    adaptive.EXPERIMENT: {
        "study": "the study's own rule",
        **{name: name for name in ("gradient-norm", "percentile", "linear", "geometric")},
    },
    caching.EXPERIMENT: {
        **{f"cut{cut}-on": f"{cut} of 6 stages frozen from the start and cached" for cut in (3, 4, 5)},
        "voted": "percentile with two views",
        "voted-auto": "percentile with two views and `--cache auto`",
    },
    pixels64.EXPERIMENT: {
        **{name: name for name in ("gradient-norm", "geometric", "geometric-cached")},
        **{f"cut{cut}-cached": f"{cut} of 6 stages frozen from the start and cached" for cut in (4, 5)},
    },
}
"""Alternatives to full fine-tuning: experiment, label and title."""
SHOWN = ("ahead", "no difference shown", "behind")


def front(root: Path) -> list[tuple[int, str, str, str]]:
    """Return how everything stands against full fine-tuning trained for as long, sorted by what the intervals show."""
    found = []
    for experiment, labels in CHOICES.items():
        results = experiment.open(root)
        for label, words in labels.items():
            shows = verdict(results.over_front(label), *SHOWN[::2], SHOWN[1]).removesuffix(" (negative)")
            told = results.shown_as(label).replace(label, words, 1)
            found.append((int(results.of(label)[0]["image_size"]), shows, told, bare(results.lead(label))))
    return sorted(found, key=lambda row: (row[0], SHOWN.index(row[1])))


def pairs(root: Path) -> Iterator[tuple[str, int, Results, str]]:
    """Yield experiment, samples, rows and the best of full fine-tuning of all that `hvfreeze auto` is compared on."""
    for name in ("peers", "peers_more", "peers64", "peers_mobilenet"):
        for samples, own in by_samples(peers.EXPERIMENTS[name].open(root)):
            yield name, samples, own, best_full(own)


def setting(results: Results) -> str:
    """Return the images' size, and the model where it is another."""
    row = results.rows[0]
    return f"{row['image_size']} pixels" + ("" if row["model"] == TIMED else f", {row['model']}")


def machines(root: Path) -> list[tuple[str, ...]]:
    """Return a row for each machine: its experiments with their runs, and when."""
    known = {name: machine_of(environment) for name, environment in by_name(root / ENVIRONMENTS).items()}
    found = [
        (known[line["environment"]], path.parent.name, str(line.get("finished") or "")[:10])
        for path in sorted(root.glob(f"*/{RUNS}"))
        for line in read_lines(path).values()
    ]
    for path in sorted(root.glob("step_costs/*.json")):
        costs = json.loads(path.read_text(encoding="utf-8"))
        each = {machine_of(costs.get("stamps", {}).get(name, costs)) for name in costs["seconds"]}
        found += [(machine, f"step_costs, {path.stem}", "") for machine in each]
    rows: list[tuple[str, ...]] = []
    for machine, mine in pd.DataFrame(found, columns=["machine", "experiment", "day"]).groupby("machine"):
        processor, cores, system = (*str(machine).split(", "), "not kept")[:3]
        told = ", ".join(f"{name} ({count})" for name, count in mine["experiment"].value_counts().sort_index().items())
        days = sorted(filter(None, set(mine["day"])))
        when = " to ".join(dict.fromkeys(days[:1] + days[-1:])) or "not kept"
        rows.append((processor, cores.removesuffix(" cores"), system, told, str(len(mine)), when))
    return rows


class Bench:
    """The rows of the benchmark."""

    def __init__(self, root: Path) -> None:
        rows = json.loads((root / "bench" / "bench.json").read_text(encoding="utf-8"))
        self.rows = {row["name"]: row for row in rows}

    def cells(self, names: Sequence[str]) -> tuple[str, str, str]:
        """Return ratio, interval and bound of some rows together."""
        chosen = [self.rows[name] for name in names]
        ratios = [f"{value:.2f}" for value in sorted({row["ratio"] for row in chosen})]
        ratio = ratios[0] if len(ratios) == 1 else f"{ratios[0]} to {ratios[-1]}"
        low, high = min(row["low"] for row in chosen), max(row["high"] for row in chosen)
        missed = "" if all(row["ok"] for row in chosen) else " (missed)"
        return ratio, f"{low:.2f} to {high:.2f}", f"{chosen[0]['bound']:g}{missed}"

    def time(self, name: str) -> str:
        """Return our own time in a row's description."""
        timed = next(part for part in reversed(self.rows[name]["what"].split("; ")) if "ms against " in part)
        return str(timed.partition(" against ")[0])


def words(root: Path) -> Words:
    bench = Bench(root)
    return {
        "front": front(root),
        "pairs": list(pairs(root)),
        "setting": setting,
        "mean_time": lambda results, label: seconds(results.mean(label, "train_seconds").mean),
        "machines": machines(root),
        "bench": bench.cells,
        "bench_time": bench.time,
    }
