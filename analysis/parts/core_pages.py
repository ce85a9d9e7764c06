"""What the runs of `analysis.cores` came to: images a second, speed-up and efficiency of each way on so many ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from analysis.sweeps.charts import FULL, METHOD_COLOURS, OTHERS, Line, line_chart
from analysis.sweeps.experiment import Answer, Drawing
from analysis.sweeps.kept import Row
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, of_seeds, paired_ratio, shown
from hvfreeze.report.figures import DASHES
from hvfreeze.report.tables import Table, factor, number, percent, seconds
from hvfreeze.wording import plural

WAYS = {
    "full": "full, one batch of all ranks",
    "frozen": "frozen by a schedule, one batch",
    "weak": "full, a batch each",
    "copies": "copies without MPI",
    "solved-few": "solved head, 5 000 images",
    "solved-many": "solved head, 20 000 images",
}
QUESTIONS = {
    "full": "Do more cores help full fine-tuning with one batch of all ranks?",
    "frozen": "Do more cores help where blocks are frozen by a schedule?",
    "solved-few": "Do more cores help to solve a head on 5 000 images?",
}
ALONE = {"copies": "weak"}
"""Way -> the way whose single rank it is held against, where that is another."""
LOOKS = {
    "full": (METHOD_COLOURS[FULL], DASHES[0]),
    "frozen": (METHOD_COLOURS["linear"], DASHES[0]),
    "weak": (METHOD_COLOURS[FULL], DASHES[1]),
    "copies": (OTHERS[0], DASHES[2]),
    "solved-few": (METHOD_COLOURS["--freeze auto"], DASHES[0]),
}

PARTS = ("train_seconds", "seconds_allreduce", "seconds_optimizer")


def sizes(results: Results, way: str) -> list[int]:
    """Return the numbers of ranks that a way was measured on, the fewest first."""
    return sorted({int(row["ranks"]) for row in results.rows if str(row["label"]).rpartition("-")[0] == way})


def rates(results: Results, way: str, ranks: int) -> dict[int, float]:
    """Return the images a second of all ranks for each seed, after the first epoch where there are more.

    In that memory and libraries come up to speed, and copies start beside each other.
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


def answers(results: Results) -> list[Answer]:
    """Return for each way what the most ranks give."""
    found = [strong(results, way) for way in QUESTIONS if len(sizes(results, way)) > 1]
    return [*found, *weak(results)]


def strong(results: Results, way: str) -> Answer:
    """Return whether the most ranks are the fastest, of a way whose work all ranks share."""
    known = sizes(results, way)
    few, most = known[0], known[-1]
    best = max(known, key=lambda ranks: of_seeds(rates(results, way, ranks)).mean)
    last, whole = gain(results, way, most, best), gain(results, way, best, few)
    text = f"{most} ranks are {shown(whole, factor, count=True)} as fast as {few}."
    if best < most:
        text = f"{most} ranks are {shown(last, factor, count=True)} as fast as {best}, which are "
        text += f"{shown(whole, factor)} as fast as {few}."
    details = exchange_details(results, way, best) if way != "solved-few" else solver_details(results, way)
    n = min(last.n, whole.n) if best < most else whole.n
    return Answer(question=QUESTIONS[way], text=text, n=n, negative=best < most, details=details)


def exchange_details(results: Results, way: str, best: int) -> tuple[str, ...]:
    """Return what a rank has to compute in a step, and what of its time it waits for gradients."""
    told = []
    for ranks in dict.fromkeys((best, sizes(results, way)[-1])):
        label = f"{way}-{ranks}x"
        part = results.mean(label, "step_allreduce").mean / results.mean(label, "step_seconds").mean
        told.append(f"{percent(part, 0)} on {plural(ranks, 'rank')} of {results.of(label)[0]['batch_size']} images")
    return (f"Of a step the exchange of gradients that nothing hides takes {', '.join(told)}.",)


def solver_details(results: Results, way: str) -> tuple[str, ...]:
    """Return what the solver takes on any number of ranks, and the features beside it."""
    labels = [f"{way}-{ranks}x" for ranks in sizes(results, way)]
    solver = [results.mean(label, "seconds_optimizer").mean for label in labels]
    features = [results.mean(label, "seconds_forward").mean for label in (labels[0], labels[-1])]
    return (
        f"The solver takes {seconds(min(solver))} to {seconds(max(solver))} on any number of ranks: rank 0 leads it.",
        f"Features take {seconds(features[0])} on the fewest ranks, {seconds(features[1])} on the most.",
    )


def weak(results: Results) -> list[Answer]:
    """Return what ranks with a batch of their own lose by the machine, and what by waiting for each other."""
    known = sizes(results, "weak")
    if len(known) < 2 or known[0] != 1 or known[-1] not in sizes(results, "copies"):
        return []
    most = known[-1]
    ours, theirs = (gain(results, way, most, 1) for way in ("weak", "copies"))
    text = (
        f"{most} ranks train {shown(ours, factor, count=True)} as many images a second as one; {most} copies without "
        f"MPI {shown(theirs, factor)}."
    )
    alone = [copy_rates(results, row) for row in results.of(f"copies-{most}x")]
    slowest = sum(min(each) / (sum(each) / len(each)) for each in alone) / len(alone)
    details = (
        "What the copies lose is the machine's: shared caches, memory and clock. The rest is MPI's, and waiting.",
        f"The slowest copy comes to {percent(slowest, 0)} of a copy's mean; ranks wait for the slowest in every step.",
        (
            f"Forward and backward passes take {seconds(passes(results, 1))} on one rank and "
            f"{seconds(passes(results, most))} on {most}, whose cores also copy and sum gradients meanwhile."
        ),
        *exchange_details(results, "weak", known[-2]),
    )
    question = "What do ranks with a batch each lose, and what of it to the machine?"
    return [Answer(question=question, text=text, n=min(ours.n, theirs.n), details=details)]


def passes(results: Results, ranks: int) -> float:
    """Return the seconds of forward and backward passes, where each rank has a batch of its own."""
    return sum(results.mean(f"weak-{ranks}x", f"seconds_{name}").mean for name in ("forward", "backward"))


def tables(results: Results) -> list[Table]:
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
    title = (
        "Images a second of all ranks, against the fewest ranks that the way was measured on (copies: one rank alone). "
        "Training: seconds of rank 0, or of copy 0, all epochs"
    )
    return [Table(title=title, columns=heads, rows=tuple(rows))]


def middle(values: Mapping[int, float]) -> Interval:
    """Return the mean over seeds without an interval, which two runs would make wider than the figure."""
    return Interval(of_seeds(values).mean, math.nan, math.nan, len(values))


def drawings(results: Results) -> list[Drawing]:
    """Return images a second over ranks."""
    lines = []
    for way, (colour, dash) in LOOKS.items():
        points = {ranks: middle(rates(results, way, ranks)) for ranks in sizes(results, way)}
        if points:
            lines.append(Line(label=WAYS[way], points=points, colour=colour, dash=dash))
    counts = sorted({len(results.of(label)) for label in results.labels})
    caption = (
        "Images a second of all ranks, a rank on each core, after the first epoch where there are more; "
        f"n = {' or '.join(map(str, counts))} a point, the mean where there are more."
    )
    figure = line_chart(lines, x="ranks, a core each", y="images a second", log_x=True)
    return [Drawing(name="cores", caption=caption, figure=figure)] if lines else []
