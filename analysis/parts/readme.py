"""The parts of README.md that say numbers: each is made from what is kept in results/, between markers of its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from analysis import votes
from analysis.parts import cached_commands, core_pages, machines
from analysis.parts.cached_epochs import by_account, saved_by_clocks
from analysis.parts.clock_tables import factor_of_commands
from analysis.parts.clock_tables import verdicts as whole_commands
from analysis.parts.growth_pages import MEASURED, largest
from analysis.parts.growth_pages import kept as kept_growth
from analysis.parts.growth_pages import verdict as growth_verdict
from analysis.parts.growth_pages import whole_commands as grown_commands
from analysis.parts.networks.tables import kept, table, verdicts
from analysis.parts.peers import TIMED, Cell, best_full, by_samples, cell_of
from analysis.parts.strategies import critic_runs, ring_runs, subnet_runs
from analysis.sweeps.experiment import Answer, claim
from analysis.sweeps.kept import texts_of
from analysis.sweeps.pages import claims
from analysis.sweeps.results import Results, open_results
from analysis.sweeps.statistics import Interval, shown, signed_points, verdict
from hvfreeze.report.tables import percent, seconds

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
![Accuracy against training time of all ways of fine-tuning](analysis/results/peers/figures/front.svg)

The figure shows 32 pixels. A ResNet-18 pretrained on CIFAR-100, or a MobileNetV3 pretrained on half of CIFAR-10's
classes, is fine-tuned on a few images of CIFAR-10's (other) classes. 2 ranks, batches of 64 a rank (32 with 1 000
images), 95 % intervals.

- `--freeze auto --epochs 1` solves the head alone and has no learning rate to choose; without `--epochs 1` a trial of
  tuning comes on top.
- Full fine-tuning has the best of three learning rates, tried on one seed (at 32 pixels with up to 5 000 images;
  elsewhere the same rates).
- It has the best number of epochs up to 16; with 5 000 images at 64 pixels up to 8, where more may be better.
- The seconds of full fine-tuning are its steps times the seconds of a step on an idle machine. Those of `--freeze
  auto --epochs 1` and of MobileNet are the clock's.
- The kernel head and its 512 dimensions were chosen on the test set of seed 0.

Test accuracy in training time, `--freeze auto --epochs 1` with and without mirror images beside full fine-tuning, and
its points against that, and against full fine-tuning that is trained as long:"""
COMMANDS_ARE = """\
These are training times. Starting, reading images, evaluating and writing the model come on top. The whole command,
from its start until all ranks have left, in seconds, one run each; the shortest full fine-tuning within half a point of
the best ([1 and 4 ranks, limits](analysis/results/clock/README.md)). In brackets: where training alone counts.\n"""
CACHE_IS = """\
Four of six stages of a ResNet-18 frozen, 5 000 images of CIFAR-10 at 32 pixels, two views of each, 2 ranks; means and
95 % intervals over seeds ([numbers, commands, logs](analysis/results/caching/README.md)).
"""
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


def choices(root: Path) -> Iterator[tuple[Results, str, str]]:
    """Yield results, label and words of all runs that are a user's choice beside full fine-tuning."""
    for name, reference in REFERENCES.items():
        results = open_results(root, name, reference)
        for label in results.labels:
            told = in_words(results, label)
            if told and label != reference:
                yield results, label, told


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
    found: list[tuple[int, int, str]] = []
    counts, better = [], []
    order = ("ahead", "no difference shown", "behind")
    for results, label, told in choices(root):
        lead = results.over_front(label)
        if lead.n > 1:
            shows = verdict(lead, "ahead", "behind", "no difference shown").removesuffix(" (negative)")
            size = int(results.of(label)[0]["image_size"])
            cells = (str(size), shows, told, results.lead_text(label).replace(" points", ""))
            found.append((size, order.index(shows), f"| {' | '.join(cells)} |"))
            counts.append(lead.n)
        if results.change(label).low > 0:
            better.append(told)
    if not found:
        return NOTHING_YET
    first = (
        "Against full fine-tuning stopped after the same training time, the simplest alternative (points of test\n"
        f"accuracy, 95 % intervals, paired by seed, n = {min(counts)}):\n"
    )
    last = "Of these none is shown to be more accurate than full fine-tuning for all epochs."
    if better:
        last = f"More accurate than full fine-tuning for all epochs: {', '.join(better)}."
    heads = ("| pixels | shown | way | points |", "|---:|:---|:---|---:|")
    return "\n".join([first, *heads, *(line for *_, line in sorted(found, key=lambda row: row[:2])), "", last])


def points(change: Interval, *, count: bool = False) -> str:
    """Return a change in points without the word."""
    return shown(change, signed_points, count=count).replace(" points", "")


def cache(root: Path) -> str:
    """Return what the cache saves and what views and types cost, from the caching experiment."""
    results = open_results(root, "caching", "full")
    if not results.of("cut4-on") or not results.of("cut4-off"):
        return NOTHING_YET
    views = {"one": "views1", "two": "cut4-on", "four": "views4", "eight": "views8"}
    told = {f"{name} instead of fresh draws": points(results.change(of, "fresh")) for name, of in views.items()}
    told["two, rows in float16 instead of float32"] = points(results.change("float16", "cut4-on"), count=True)
    rows = [f"| {name} | {change} |" for name, change in told.items()]
    clocks = shown(saved_by_clocks(results, "cut4-on"), seconds, count=True)
    account = shown(by_account(results, "cut4-on"), seconds, count=True)
    plan = seconds(by_account(results, "cut4-on", "cache_seconds_saved_predicted").mean)
    saved = (
        f"- By the clocks {clocks} were saved on each rank.",
        f"- By the program's own account {account} were; its plan had said {plan}.",
    )
    lines = [CACHE_IS, *saved, "", "| views of a sample | points of accuracy |", "|:---|---:|", *rows]
    return "\n".join(lines) + of_commands(root)


def of_commands(root: Path) -> str:
    """Return where whole commands with and without a cache are told, behind an empty line; empty without any."""
    if not cached_commands.in_brief(open_results(root, cached_commands.NAME)):
        return ""
    page = f"analysis/results/{cached_commands.NAME}/README.md"
    return f"\n\nWhole commands with and without it: [in brief](cache.md#when-it-pays), [numbers and limits]({page})."


def cache_pays(root: Path) -> str:
    """Return by how much whole commands are faster, for the guide; empty where none were timed."""
    results = open_results(root, cached_commands.NAME)
    lines, folder = cached_commands.in_brief(results), f"analysis/results/{cached_commands.NAME}"
    if not lines:
        return ""
    picture = "![Seconds of all commands as learning rates are tried, with a shared cache and without]"
    figure = f"\n\n{picture}({folder}/figures/learning-rates.svg)" if cached_commands.sweeps(results) else ""
    told = "\n".join(lines)
    return f"By the clock of the whole command ([numbers, limits]({folder}/README.md)):\n\n{told}{figure}\n"


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


def growth(root: Path) -> str:
    """Return what the head of the most rows took."""
    lines = [line for line in kept_growth(root / "growth" / MEASURED) if line["kind"] == "made"]
    if not lines:
        return NOTHING_YET
    told, folder = growth_verdict(largest(lines)[0]), "analysis/results/growth"
    return f"![growth]({folder}/figures/growth.svg)\n\n{told} [All runs]({folder}/README.md)."


def whole_runs(root: Path) -> str:
    """Return whole commands of `--freeze auto` beside full fine-tuning, from thousands of images on."""
    lines = [line for line in kept_growth(root / "growth" / MEASURED) if line["kind"] == "images"]
    return grown_commands(lines) or NOTHING_YET


def network(root: Path) -> str:
    """Return images a second on 1, 2 and 4 nodes, by network and by way of exchanging gradients."""
    rows = kept(root / "network" / "rows.csv")
    if not rows:
        return NOTHING_YET
    return (
        "ResNet-18 at 32 pixels, 64 images a rank, one rank a node. Cells are images per second and, in brackets, the "
        "scaling efficiency:\nthroughput over that of one node alone times the nodes, measured in turn "
        "([numbers, forecasts, limits](analysis/results/network/README.md)). In the column\n`nothing sent` each node "
        "trains by itself, and its loss is due to the shared machine. The next four columns are our\n"
        f"`--compression`.\n\n{table(rows)}\n\n{verdicts(rows)}"
    )


@dataclass(frozen=True)
class Pair:
    """`--freeze auto` and full fine-tuning on so many samples of an experiment."""

    experiment: str
    samples: int
    results: Results

    def auto(self, peer: str = "auto") -> str:
        return Cell(samples=self.samples, peer=peer, epochs=1).label

    @property
    def ground(self) -> str:
        """The images' size, and the model where it is another."""
        row = self.results.of(self.auto())[0]
        return f"{row['image_size']} pixels" + ("" if row["model"] == TIMED else f", {row['model']}")

    def seconds(self, label: str) -> str:
        return seconds(self.results.mean(label, "train_seconds").mean)


def pairs(root: Path) -> Iterator[Pair]:
    """Yield all that was compared with `--freeze auto`."""
    for name in COMPARISONS:
        for samples, own in by_samples(open_results(root, name)):
            pair = Pair(name, samples, own)
            if own.of(pair.auto()):
                yield pair


def ways(root: Path) -> str:
    """Return the figure of all ways, and what `--freeze auto` alone comes to beside full fine-tuning."""
    heads = (
        "images",
        "n",
        "`--freeze auto --epochs 1`",
        "and `--mirror off`",
        "full fine-tuning",
        "against it",
        "trained as long",
    )
    rows = [beside_full(pair) for pair in pairs(root)]
    if not rows:
        return NOTHING_YET
    table = [f"| {' | '.join(heads)} |", "|:---|" + "---:|" * (len(heads) - 1)]
    table += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([WAYS_ARE, "", *table, "", COMMANDS_ARE, whole_commands(texts_of(root / "clock" / "rows.csv"))])


def beside_full(pair: Pair) -> tuple[str, ...]:
    """Return a row of `--freeze auto` beside full fine-tuning."""
    own, auto, once, full = pair.results, pair.auto(), pair.auto("auto-one-view"), best_full(pair.results)
    return (
        f"[{pair.samples} at {pair.ground}](analysis/results/{pair.experiment}/README.md)",
        str(len(own.of(auto))),
        f"{own.accuracy_text(auto)} in {pair.seconds(auto)}",
        f"{own.accuracy_text(once)} in {pair.seconds(once)}" if own.of(once) else "",
        f"{own.accuracy_text(full)} in {pair.seconds(full)}, {cell_of(full).epochs} epochs",
        points(own.change(auto, full)),
        own.lead_text(auto).replace(" points", ""),
    )


def headline(root: Path) -> str:
    """Return a row for each number of samples: full fine-tuning, `--freeze auto`, and how much sooner it is done."""
    lines, clock = [], texts_of(root / "clock" / "rows.csv")
    for pair in pairs(root):
        own, auto, full = pair.results, pair.auto(), best_full(pair.results)
        both = (f"{percent(own.mean(label, 'test_accuracy').mean)} in {pair.seconds(label)}" for label in (full, auto))
        times = factor_of_commands(clock, experiment=pair.experiment, samples=str(pair.samples))
        change = own.change(auto, full)
        cells = (f"{pair.samples} at {pair.ground}", str(change.n), *both, shown(change, signed_points), times)
        lines.append(f"| {' | '.join(cells)} |")
    heads = "| images | n | full fine-tuning | `--freeze auto --epochs 1` | difference | whole command |"
    return "\n".join([heads, "|:---|---:|---:|---:|---:|---:|", *lines]) if lines else NOTHING_YET


def strategy(answers: Callable[[Results], list[Answer]]) -> Callable[[Path], str]:
    """Return a part that tells what was measured of a strategy."""

    def part(root: Path) -> str:
        lines = [claim(answer) for answer in answers(open_results(root, "strategies"))]
        more = "\nSmall models and one machine; [tables and limits](analysis/results/strategies/README.md)."
        return "\n".join([*lines, more]) if lines else NOTHING_YET

    return part


def cores(root: Path) -> str:
    """Return the figure of images a second over ranks, and what more of them give."""
    results = open_results(root, "cores")
    answers = core_pages.answers(results)
    if not answers:
        return NOTHING_YET
    most = max(row["ranks"] for row in results.rows)
    folder = "analysis/results/cores"
    picture = f"![Images a second over the number of ranks]({folder}/figures/cores.svg)"
    told = (
        f"Up to {most} ranks, each on a core of one machine, one run or two each ([table, limits]({folder}/README.md)):"
    )
    return "\n".join([picture, "", told, "", *map(claim, answers)])


def voting(root: Path) -> str:
    """Return what the guide says of the votes' weights and quorum."""
    if not (root / votes.NAME).exists():
        return NOTHING_YET
    ((_, _, advice),) = claims(votes.PAGE.text(root))
    return f"{advice} [All rules](analysis/results/votes/README.md)."


PARTS: dict[str, Callable[[Path], str]] = {
    "headline": headline,
    "ways": ways,
    "front": front,
    "cache": cache,
    "cache-pays": cache_pays,
    "bench": bench,
    "growth": growth,
    "whole-runs": whole_runs,
    "network": network,
    "cores": cores,
    "critics": strategy(critic_runs.answers),
    "ring": strategy(ring_runs.answers),
    "subnets": strategy(subnet_runs.of_subnets),
    "local-sgd": strategy(subnet_runs.of_local_sgd),
    "voting": voting,
    "machines": lambda root: machines.table(root) or NOTHING_YET,
}
"""Markers of README.md, with what stands between them, besides the table of answers."""
