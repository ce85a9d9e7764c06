"""The parts of README.md that say numbers: each is made from what is kept in results/, between markers of its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from analysis.parts.cached_epochs import saved_by_clocks
from analysis.parts.clock_tables import verdicts as whole_commands
from analysis.parts.networks.tables import kept, table, verdicts
from analysis.parts.peers.answers import best_full, by_samples
from analysis.parts.peers.labels import Cell, cell_of
from analysis.parts.peers.times import TIMED
from analysis.sweeps.results import Results, open_results
from analysis.sweeps.rows import texts_of
from analysis.sweeps.statistics import Interval, is_below, shown, signed_points
from hvfreeze.report.units import percent, seconds

COMPARISONS = ("peers", "peers_more", "peers64", "peers_mobilenet")
"""Experiments that compare all ways of fine-tuning."""
NOTHING_YET = "No results are recorded yet."
REFERENCES = {"static_sweep": "groups0", "adaptive": "full", "caching": "full", "pixels64": "full"}
"""Experiments whose runs are held against the front, with the label of full fine-tuning in each."""
STAGES, GROUPS = 6, 7
WORDS = {
    "study": "the study's own rule",
    "voted": "percentile with two views",
    "voted-auto": "percentile with two views and `--cache auto`",
}
"""Labels that say too little."""
WAYS_ARE = """\
![Accuracy against training time of all ways of fine-tuning](analysis/results/peers/figures/front.png)

A ResNet-18 pretrained on CIFAR-100, or a MobileNetV3 on half of CIFAR-10's classes, fine-tuned on a few images of
CIFAR-10's (other) classes, 2 ranks, batches of 64 a rank (32 with 1 000 images), 95 % intervals; the figure is of 32
pixels. `--freeze auto` has no learning rate to choose; full fine-tuning has the best of three, tried on one seed (at
32 pixels with up to 5 000 images, elsewhere those rates), and of up to 8 epochs, 16 with 1 000 images, as many as
serve it best; where that is 8, more may. Its seconds are its steps times what a step takes on an idle machine; those
of `--freeze auto` and of MobileNet are the clock's. That auto's head compares rows, and in 512 directions, was
decided on seed 0 of these test images."""
COMMANDS_ARE = """\
That is training time: starting, reading images, evaluating and writing the model come beside it. The whole command,
from its start until all ranks have left, one run each, against the shortest full fine-tuning within half a point of
the best ([1 and 4 ranks, limits](analysis/results/clock/README.md)):"""
BENCH = (
    ("a plain loop with `hvd.DistributedOptimizer`, nothing frozen", ("step_vs_distributed_optimizer",)),
    ("torch DistributedDataParallel over gloo, nothing frozen", ("step_vs_ddp_gloo",)),
    ("not observing gradients for the vote", ("observing_gradients",)),
    ("the frozen step by hand, cuts 1 to 5", tuple(f"frozen_step_cut{cut}" for cut in range(1, 6))),
    (
        "the suffix's step on activations in memory, cuts 1 to 4",
        tuple(f"cached_step_cut{cut}" for cut in range(1, 5)),
    ),
    ("the same, cut 5, where our time is 2 ms", ("cached_step_cut5",)),
    ("an epoch that fills no cache, cuts 1 and 5", ("filling_epoch_cut1", "filling_epoch_cut5")),
    ("`numpy.memmap`, shuffled batches of rows of 64 KB", ("shuffled_read_64k",)),
    ("`numpy.memmap`, shuffled batches of rows of 2 KB", ("shuffled_read_2k",)),
)
"""Rows of the benchmark that README shows, several in one line where they differ in the cut only."""


def leads(root: Path) -> Iterator[tuple[int, str, Interval]]:
    """Yield image size, what was done and its lead over full fine-tuning trained for as long, of every kind of run."""
    for name, reference in REFERENCES.items():
        results = open_results(root, name, reference)
        for label in results.labels:
            told = in_words(results, label)
            if told and label != reference:
                yield int(results.of(label)[0]["image_size"]), told, results.over_front(label)


def in_words(results: Results, label: str) -> str:
    """Return what a label's runs did, empty for those that are no choice of a user's."""
    row = results.of(label)[0]
    other_question = label.startswith(("epochs", "residual", "views")) or row["cache_dtype"] != "native"
    if other_question or row["validation_fraction"] or row["freeze"] == "none":
        return ""
    if row["freeze"] != "static":
        return results.shown_as(label).replace(label, WORDS.get(label, label), 1)
    if row["cache"] != "off":
        return f"{row['cut']} of {STAGES} stages frozen from the start and cached"
    return f"{row['cut']} of {GROUPS} groups frozen from the start" if label.startswith("groups") else ""


def front(root: Path) -> str:
    """Return how everything stands against full fine-tuning trained for as long, sorted by what the intervals show."""
    found = [(size, told, lead) for size, told, lead in leads(root) if lead.n > 1]
    if not found:
        return NOTHING_YET
    n = min(lead.n for _, _, lead in found)
    first = (
        "Against full fine-tuning trained for as many seconds, which anybody can do instead (points of test accuracy,\n"
        f"95 % intervals, paired by seed, n = {n}):\n"
    )
    lines = [first]
    for size in sorted({size for size, _, _ in found}):
        mine = [(told, lead) for where, told, lead in found if where == size]
        ahead = [each for each in mine if each[1].low > 0]
        behind = [each for each in mine if is_below(each[1], 0)]
        level = [each for each in mine if each not in ahead and each not in behind]
        for word, chosen in (("ahead", ahead), ("no difference shown", level), ("behind", behind)):
            if chosen:
                listed = "; ".join(f"{told} {shown(lead, signed_points)}" for told, lead in chosen)
                lines.append(f"- {size} pixels, {word}: {listed.replace(' points', '')}.")
    return "\n".join([*lines, "", whole(root)])


def whole(root: Path) -> str:
    """Return whether anything is more accurate than full fine-tuning for all epochs."""
    better = []
    for name, reference in REFERENCES.items():
        results = open_results(root, name, reference)
        labels = [label for label in results.labels if label != reference and in_words(results, label)]
        better += [in_words(results, label) for label in labels if results.change(label, reference).low > 0]
    if better:
        return f"More accurate than full fine-tuning for all epochs: {', '.join(better)}."
    return "Of these none is shown to be more accurate than full fine-tuning for all epochs."


def cache(root: Path) -> str:
    """Return what the cache saves and what views and types cost, from the caching experiment."""
    results = open_results(root, "caching", "full")
    if not results.of("cut4-on") or not results.of("cut4-off"):
        return NOTHING_YET
    predicted = results.mean("cut4-on", "cache_seconds_saved_predicted")
    views = {"one": "views1", "two": "cut4-on", "four": "views4", "eight": "views8"}
    costs = ", ".join(
        f"{name} {shown(results.change(label, 'fresh'), signed_points).replace(' points', '')}"
        for name, label in views.items()
    )
    halved = shown(results.change("float16", "cut4-on"), signed_points, count=True).replace(" points", "")
    return (
        f"Four of six stages of a ResNet-18 frozen, 5 000 images of CIFAR-10 at 32 pixels, two views of each, 2 ranks, "
        f"mean and 95 % interval over seeds ([numbers, commands, logs](analysis/results/caching/README.md)). The plan "
        f"said that {seconds(predicted.mean)} would be saved on each rank; by the clocks "
        f"{shown(saved_by_clocks(results, 'cut4-on'), seconds, count=True)} were, by the program's own account "
        f"{shown(results.mean('cut4-on', 'cache_seconds_saved'), seconds, count=True)}. What views "
        f"cost against fresh draws, in points of accuracy: {costs}; what rows in float16 cost: {halved}."
    )


def bench(root: Path) -> str:
    """Return the benchmark's rows that README shows, with their intervals."""
    path = root / "bench" / "bench.json"
    if not path.exists():
        return NOTHING_YET
    rows = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    lines = ["| our time over that of | ratio | 95 % interval | asked for |", "|---|---:|---:|---:|"]
    for told, names in BENCH:
        chosen = [rows[name] for name in names]
        ratios = [f"{value:.2f}" for value in sorted({row["ratio"] for row in chosen})]
        ratio = ratios[0] if len(ratios) == 1 else f"{ratios[0]} to {ratios[-1]}"
        low, high = min(row["low"] for row in chosen), max(row["high"] for row in chosen)
        missed = "" if all(row["ok"] for row in chosen) else " (missed)"
        lines.append(f"| {told} | {ratio} | {low:.2f} to {high:.2f} | {chosen[0]['bound']:g}{missed} |")
    frozen, cached = (milliseconds(rows[f"{name}_step_cut5"]["what"]) for name in ("frozen", "cached"))
    full = milliseconds(rows["step_vs_distributed_optimizer"]["what"])
    lines.append(
        f"\nWith five of six blocks frozen a step takes {frozen}, with their output cached {cached}, and {full} with "
        "nothing frozen. Missed: the whole interval is above what was asked, or too wide to say; there is more on each."
    )
    return "\n".join(lines)


def milliseconds(what: str) -> str:
    """Return our own time in a benchmark row's description."""
    timed = next(part for part in reversed(what.split("; ")) if "ms against " in part)
    return timed.partition(" against ")[0]


def network(root: Path) -> str:
    """Return images a second on 1, 2 and 4 nodes, by network and by way of exchanging gradients."""
    rows = kept(root / "network" / "rows.csv")
    if not rows:
        return NOTHING_YET
    return (
        "ResNet-18 at 32 pixels, 64 images a rank, one rank a node: images a second, and in brackets the part of as "
        "many times one node's\nalone, measured in turn with them "
        "([numbers, forecasts, limits](analysis/results/network/README.md)). Where nothing is\nsent, nodes train "
        "beside each other, each for itself: what they lose is the shared machine's doing. The four after it are\n"
        f"`--compression` of ours.\n\n{table(rows)}\n\n{verdicts(rows)}"
    )


def ways(root: Path) -> str:
    """Return the figure of all ways, and what `--freeze auto` alone comes to beside full fine-tuning."""
    lines = [line for name in COMPARISONS for line in beside_full(root, name)]
    if not lines:
        return NOTHING_YET
    return "\n".join(
        [WAYS_ARE, "", *lines, "", COMMANDS_ARE, "", *whole_commands(texts_of(root / "clock" / "rows.csv"))]
    )


def beside_full(root: Path, name: str) -> Iterator[str]:
    """Yield a line for each number of samples of an experiment: `--freeze auto` beside full fine-tuning."""
    for samples, own in by_samples(open_results(root, name)):
        auto, full = Cell(samples=samples, peer="auto", epochs=1).label, best_full(own)
        once = Cell(samples=samples, peer="auto-one-view", epochs=1).label
        mirrorless = own.of(once) and (
            f"without mirror images (`--mirror off`) {shown(own.mean(once, 'test_accuracy'), percent)} in "
            f"{seconds(own.mean(once, 'train_seconds').mean)}; "
        )
        if own.of(auto):
            size, model = (own.of(auto)[0][column] for column in ("image_size", "model"))
            network = "" if model == TIMED else f", {model}"
            yield (
                f"- [{samples} images at {size} pixels{network}](analysis/results/{name}/README.md): "
                f"{shown(own.mean(auto, 'test_accuracy'), percent, count=True)} in "
                f"{seconds(own.mean(auto, 'train_seconds').mean)}; {mirrorless or ''}full "
                "fine-tuning comes to "
                f"{shown(own.mean(full, 'test_accuracy'), percent)} in "
                f"{seconds(own.mean(full, 'train_seconds').mean)}, {cell_of(full).epochs} epochs. "
                f"That is {shown(own.change(auto, full), signed_points)} against it, and "
                f"{shown(own.over_front(auto), signed_points)} against full fine-tuning that is trained as long."
            )


PARTS = {"ways": ways, "front": front, "cache": cache, "bench": bench, "network": network}
"""Markers of README.md, with what stands between them, besides the table of answers."""
