"""What do more cores of one machine give, a rank on each? Strong and weak scaling, and copies without MPI.

    python -m analysis.cores --data-dir DIR --weights FILE --results build/cores    on all cores of this machine
    python -m analysis.cores ... --seeds 0 --ranks 8                                once instead of three times, on 8

Strong: the same images and the same batch of all ranks, in full, with blocks frozen by a schedule, and a fitted head.
Weak: as many images and as large a batch for each rank. DIR is a folder of images, {train,test}/CLASS/*; FILE a
ResNet-18 trained at 32 pixels. Each rank has one thread and one core. Needs an idle machine.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping

from matplotlib.figure import Figure

from analysis.parts.pinned import cores
from analysis.sweeps.charts import FULL, METHOD_COLOURS, OTHERS, Line, line_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.kept import Row
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, of_seeds, paired_ratio, shown
from analysis.sweeps.sweep import main
from hvfreeze.report.figures import DASHES
from hvfreeze.report.tables import Table, factor, number, percent, seconds
from hvfreeze.wording import plural

GLOBAL_BATCH, STRONG_IMAGES = 384, 2_304
RANK_BATCH, RANK_IMAGES = 64, 384
SMALL_BATCH, SMALL_IMAGES, SMALL_RANKS = 16, 64, 2
"""Sizes of the smoke preset: batch and images (over all ranks, and per rank), and number of ranks."""
FEW, MANY = 5_000, 20_000
"""Numbers of images that a head is fitted to."""
WAYS = {
    "full": "full, one batch of all ranks",
    "frozen": "frozen by a schedule, one batch",
    "weak": "full, a batch each",
    "copies": "copies without MPI",
    "solved-few": "fitted head, 5,000 images",
    "solved-many": "fitted head, 20,000 images",
}
ALONE = {"copies": "weak"}
"""Way -> the way whose single rank it is held against, where that is another."""
LOOKS = {
    "full": (METHOD_COLOURS[FULL], DASHES[0]),
    "frozen": (METHOD_COLOURS["linear"], DASHES[0]),
    "weak": (METHOD_COLOURS[FULL], DASHES[1]),
    "copies": (OTHERS[0], DASHES[2]),
    "solved-few": (METHOD_COLOURS["hvfreeze auto"], DASHES[0]),
}
PARTS = ("train_seconds", "seconds_allreduce", "seconds_optimizer")


def runs(preset: Preset) -> list[PlannedRun]:
    """Return every way on 1, 2, 4, ... ranks, the most first, since a short time is best spent on them."""
    most = SMALL_RANKS if preset.is_smoke else preset.ranks
    sizes = sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power < most)}, reverse=True)
    asked = {"full": sizes, "weak": sizes, "copies": sizes[:1]}
    if not preset.is_smoke:
        asked |= {"solved-few": sizes, "frozen": sizes, "solved-many": sizes[:2]}
    return [
        PlannedRun(
            label=f"{way}-{ranks}x",
            seed=seed,
            flags=flags(preset, way, ranks),
            ranks=ranks,
            program=f"analysis.parts.{'copies' if way == 'copies' else 'pinned'}",
        )
        for seed in preset.seeds
        for way, chosen in asked.items()
        for ranks in chosen
    ]


def flags(preset: Preset, way: str, ranks: int) -> dict[str, Value]:
    """Return the flags of a way on so many ranks."""
    known = preset.common()
    found: dict[str, Value] = {
        name: known[name] for name in ("data", "model", "image_size", "weights") if name in known
    }
    found |= {"mirror": "off", "augment": "none", "cache": "off", "checkpoint_every": "0"}
    if not preset.is_smoke:
        found |= {"data": "imagefolder", "data_dir": "./"}
    if way.startswith("solved"):
        return {**found, "freeze": "auto", "epochs": 1, "train_samples": FEW if way == "solved-few" else MANY}
    strong = (SMALL_BATCH, SMALL_IMAGES) if preset.is_smoke else (GLOBAL_BATCH, STRONG_IMAGES)
    each = (SMALL_BATCH, SMALL_IMAGES) if preset.is_smoke else (RANK_BATCH, RANK_IMAGES)
    batch, images = (strong[0] // ranks, strong[1]) if way in ("full", "frozen") else each
    epochs = 4 if way == "frozen" else 3
    found |= {"lr": 0.05, "schedule": "cosine", "epochs": epochs, "evaluate_every": epochs, "batch_size": batch}
    found |= {"train_samples": images * (ranks if way == "weak" else 1)}
    return {**found, "freeze": "linear", "cache": "on"} if way == "frozen" else found


def sizes(results: Results, way: str) -> list[int]:
    """Return the numbers of ranks that a way was measured on, the fewest first."""
    return sorted({int(row["ranks"]) for row in results.rows if str(row["label"]).rpartition("-")[0] == way})


def rates(results: Results, way: str, ranks: int) -> dict[int, float]:
    """Return the images a second of all ranks for each seed, after the first epoch where there are more.

    The first epoch initializes memory and libraries, and copies start at different times.
    """
    return {int(row["seed"]): rate(results, row) for row in results.of(f"{way}-{ranks}x")}


def rate(results: Results, row: Row) -> float:
    """Return the images a second of a run, of all its copies where it has some."""
    if row["epochs"] == 1:
        return float(row["images_per_second"])
    if str(row["label"]).startswith("copies"):
        return sum(copy_rates(results, row))
    return float(row["ranks"] * row["batch_size"] / row["step_seconds"])


def copy_rates(results: Results, row: Row) -> list[float]:
    """Return the images a second of each copy, after its first epoch."""
    copies = (results.runs[str(row["run"])].summary or {})["copies"]
    return [len(epochs[1:]) / sum(1 / epoch for epoch in epochs[1:]) for epochs in copies]


def gain(results: Results, way: str, ranks: int, fewer: int) -> Interval:
    """Return how many times as many images a second so many ranks come to as fewer, paired by seed."""
    return paired_ratio(rates(results, way, ranks), rates(results, ALONE.get(way, way) if fewer == 1 else way, fewer))


def exposed(results: Results, way: str, ranks: int) -> str:
    """Return what of a step a rank waits for gradients, and how many images it has."""
    label = f"{way}-{ranks}x"
    share = results.mean(label, "step_allreduce").mean / results.mean(label, "step_seconds").mean
    return f"{percent(share, 0)} on {plural(ranks, 'rank')} of {results.of(label)[0]['batch_size']} images"


def table(results: Results) -> str:
    """Return a row for each way and number of ranks."""
    measured, parts = ("Images/s, each run", "Speed-up", "Efficiency"), ("exposed allreduce", "optimizer, solver")
    heads = ("Way", "Ranks", *measured, "Training", *parts)
    rows = []
    for way, words in WAYS.items():
        for ranks in sizes(results, way):
            label = f"{way}-{ranks}x"
            fewest = sizes(results, ALONE.get(way, way))[:1] or [ranks]
            faster = gain(results, way, ranks, fewest[0])
            taken = [results.mean(label, column).mean for column in PARTS]
            gained = (factor(faster.mean), percent(faster.mean * fewest[0] / ranks, 0)) if faster.n else ("", "")
            alone = len(sizes(results, way)) == 1 and way not in ALONE
            rows.append(
                (
                    words,
                    str(ranks),
                    " and ".join(map(number, rates(results, way, ranks).values())),
                    *(("", "") if alone or math.isnan(faster.mean) else gained),
                    *(seconds(part) if part else "" for part in taken),
                )
            )
    return Table(columns=heads, rows=tuple(rows)).to_text()


def middle(values: Mapping[int, float]) -> Interval:
    """Return the mean over seeds without an interval, which two runs would make wider than the figure."""
    return Interval(of_seeds(values).mean, math.nan, math.nan, len(values))


def drawings(results: Results) -> Mapping[str, Figure]:
    """Return images a second over ranks."""
    lines = []
    for way, (colour, dash) in LOOKS.items():
        points = {ranks: middle(rates(results, way, ranks)) for ranks in sizes(results, way)}
        lines.append(Line(label=WAYS[way], points=points, colour=colour, dash=dash))
    return {"cores": line_chart(lines, x="ranks, a core each", y="images a second", log_x=True)}


def words(results: Results) -> Words:
    def mean(label: str, column: str) -> float:
        return results.mean(label, column).mean

    def slowest_copy(label: str) -> float:
        alone = [copy_rates(results, row) for row in results.of(label)]
        return sum(min(each) / (sum(each) / len(each)) for each in alone) / len(alone)

    solver = [mean(f"solved-few-{ranks}x", "seconds_optimizer") for ranks in sizes(results, "solved-few")]
    return {
        "faster": lambda way, ranks, fewer, n=False: shown(gain(results, way, ranks, fewer), factor, count=n),
        "exposed": lambda way, ranks: exposed(results, way, ranks),
        "passes": lambda ranks: sum(mean(f"weak-{ranks}x", f"seconds_{name}") for name in ("forward", "backward")),
        "features": lambda ranks: mean(f"solved-few-{ranks}x", "seconds_forward"),
        "solver": (min(solver), max(solver)),
        "slowest_copy": slowest_copy("copies-16x"),
        "table": table(results),
    }


EXPERIMENT = Experiment(name="cores", runs=runs, words=words, drawings=drawings, chooses_lr=True, one_factor=False)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, ["--ranks", str(len(cores(os.sched_getaffinity(0)))), *sys.argv[1:]]))
