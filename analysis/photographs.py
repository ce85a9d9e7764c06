"""How long do photographs take? The allocator, decoding, the whole command, larger networks; before and now, in turns.

    python -m analysis.photographs --data-dir DIR --weights FILE [--only PART [PART ...]] [--out DIR]
    python -m analysis.photographs --preset smoke

DIR has {train,test}/CLASS/*.jpg, the photographs of signed digits of `analysis.tasks`; FILE is its EfficientNet-Lite0.
Photographs of 12 megapixels are made from them. Needs timm, and an idle machine of two cores for 25 minutes. The folder
gets measured.jsonl, with one line per run, a figure and README.md. Finished runs are skipped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from analysis.benchmarks.judging import bootstrap_interval
from analysis.parts.photographs import make_photographs
from analysis.sweeps.charts import FIGURE_WIDTH, OTHERS
from analysis.sweeps.kept import RESULTS, commit, publish
from analysis.sweeps.launching import follow
from analysis.sweeps.options import folder_to_write
from analysis.sweeps.pages import Page, Words
from analysis.sweeps.statistics import Interval, mean_interval, shown
from analysis.sweeps.sweep import SMOKE_RESULTS, WORK
from hvfreeze.errors import HvfreezeError, RefusedError
from hvfreeze.report.figures import COLOURS, STYLE
from hvfreeze.report.tables import Table, factor, seconds
from hvfreeze.runs.environment import facts_of_this_rank

NAME, MEASURED = "photographs", "measured.jsonl"
RANKS = 2
BEFORE, NOW = "before", "now"
"""glibc's default allocator, or JPEG files decoded at full size; and what hvfreeze does."""
SMALL = "256 pixels"
"""The same photographs, stored at 256 pixels."""
STEPS_OF = {"hvfreeze": "nothing frozen", "frozen": "half frozen", "cached": "half frozen, cached"}
RIVALS = {"horovod": ("Horovod", "analysis.parts.plain_horovod"), "ddp": ("DDP", "analysis.ddp")}
WARM_STEPS, CUT = 2, 3
"""First steps of a large network that are not counted; frozen blocks of 6."""
TIMEOUT = 1800.0
LITE = ("--model", "timm:tf_efficientnet_lite0", "--mean", "0.5", "--std", "0.5")
MODELS: Mapping[str, tuple[str, ...]] = {
    "EfficientNet-Lite0": LITE,
    "ResNet-18": ("--model", "resnet18"),
    "MobileNetV3-small": ("--model", "mobilenet_v3_small"),
    "ShuffleNet": ("--model", "shufflenet_v2_x0_5"),
    "ResNet-50": ("--model", "resnet50"),
    "ViT-S/16": ("--model", "timm:vit_small_patch16_224", "--lr", "0.001"),
}
"""Network -> its flags."""
Line = Mapping[str, Any]
"""A run: its plan, and what it took."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of a preset."""

    allocated: Mapping[str, int]
    """Network -> training steps of a run, of the allocator."""
    large: Sequence[str]
    lite: str
    """Network of the whole command and of decoding."""
    pairs: Mapping[str, int]
    """Part -> number of runs of each way."""
    photographs: int
    size: tuple[int, int]
    """Width and height of a photograph."""
    side: int = 128
    batch: int = 32
    large_side: int = 224
    large_batch: int = 8
    large_steps: int = 6


PRESETS = {
    "smoke": Scale(
        allocated={"ShuffleNet": 1},
        large=("ShuffleNet",),
        lite="ShuffleNet",
        pairs=dict.fromkeys(("allocator", "decoding", "command", "large"), 1),
        photographs=40,
        size=(640, 520),
        side=32,
        batch=4,
        large_side=32,
        large_batch=4,
        large_steps=3,
    ),
    "reduced": Scale(
        allocated={"EfficientNet-Lite0": 30, "ResNet-18": 5, "MobileNetV3-small": 15},
        large=("ResNet-50", "ViT-S/16"),
        lite="EfficientNet-Lite0",
        pairs={"allocator": 5, "decoding": 3, "command": 1, "large": 1},
        photographs=200,
        size=(4032, 3024),
    ),
}


@dataclass(frozen=True)
class Planned:
    """A run: `way` of `name`, a network or a command, for the `number`th time."""

    part: str
    name: str
    way: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where the runs find what they need."""

    scale: Scale
    work: Path
    data_dir: Path
    weights: Path | None = None

    @property
    def large(self) -> Path:
        """Folder of the photographs."""
        return self.work / "made" / "large"

    @property
    def small(self) -> Path:
        """Folder of the same photographs at 256 pixels."""
        return self.work / "made" / "small"


def planned(scale: Scale) -> list[Planned]:
    """Return all runs; the ways of a pair follow each other."""
    ways: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        "allocator": (list(scale.allocated), (BEFORE, NOW)),
        "decoding": (("prepare", "predict"), (BEFORE, NOW)),
        "command": (("auto",), (BEFORE, NOW, SMALL)),
        "large": (scale.large, (*STEPS_OF, *RIVALS)),
    }
    return [
        Planned(part, name, way, number)
        for part, (names, each) in ways.items()
        for name in names
        for number in range(scale.pairs[part])
        for way in each
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that are missing, and write them up one by one; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.photographs", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--preset", choices=PRESETS, default="reduced", help="smoke: see that everything runs (reduced)"
    )
    parser.add_argument("--only", nargs="+", choices=MEASURES, help="these parts only (all)")
    parser.add_argument("--data-dir", type=Path, help="photographs of signed digits; smoke: made")
    parser.add_argument("--weights", type=Path, help="EfficientNet-Lite0; smoke: none")
    parser.add_argument("--work", type=folder_to_write, help=f"folder for photographs and runs [{WORK / NAME}/PRESET]")
    parser.add_argument(
        "--out",
        type=folder_to_write,
        help=f"folder for {MEASURED} and README.md [{RESULTS / NAME}; smoke: {SMOKE_RESULTS / NAME}]",
    )
    options = parser.parse_args(arguments)
    is_smoke, scale = options.preset == "smoke", PRESETS[options.preset]
    parts = options.only or list(MEASURES)
    if not is_smoke and None in (options.data_dir, options.weights):
        parser.error("--data-dir and --weights must be given, except with --preset smoke")
    out = options.out or (SMOKE_RESULTS if is_smoke else RESULTS) / NAME
    work = (options.work or WORK / NAME / options.preset).resolve()
    data_dir = (options.data_dir or work / "source").resolve()
    weights = None if options.weights is None else options.weights.resolve()
    site = Site(scale=scale, work=work, data_dir=data_dir, weights=weights)
    lines = kept(out / MEASURED)
    chosen = [run for run in planned(scale) if run.part in parts]
    missing = [run for run in chosen if not any(asdict(run).items() <= line.items() for line in lines)]
    try:
        if missing:
            if is_smoke and options.data_dir is None:
                make_source(site.data_dir)
            make_photographs(site.data_dir, work / "made", count=scale.photographs, size=scale.size)
        for place, run in enumerate(missing, 1):
            print(f"[{place}/{len(missing)}] {run.part} {run.name}, {run.way}, number {run.number}", flush=True)
            found = MEASURES[run.part](run, site)
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            lines.append({**asdict(run), **found, "commit": commit(), "machine": machine(), "finished": now})
            publish(out / MEASURED, "".join(json.dumps(line) + "\n" for line in lines))
        if not is_smoke:
            PAGE.write(out.parent, out)
    except HvfreezeError as error:
        print(f"photographs: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def machine() -> str:
    """Return where and by what runs are made, but for the source."""
    known = facts_of_this_rank()
    versions = ", ".join(f"{name} {known['versions'][name]}" for name in ("torch", "horovod"))
    return f"{known['processor']}, {known['cores']} cores, one thread a rank; {versions}"


def make_source(folder: Path) -> None:
    """Make small images of two classes: the sources of the photographs in the smoke preset."""
    from PIL import Image

    for number in range(PRESETS["smoke"].photographs):
        place = folder / ("train", "test")[number % 4 == 0] / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.radial_gradient("L").rotate(9 * number).convert("RGB").save(place / f"{number}.jpg")


def kept(path: Path) -> list[Line]:
    """Return the lines of finished runs; none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@dataclass
class Finished:
    """A command that has ended."""

    seconds: float
    """Seconds of the whole command."""
    ranks: list[Line]
    """Resources of each rank, see `analysis.parts.measured_rank`."""
    run_dir: Path
    of_ranks: dict[str, list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.of_ranks = {key: [rank[key] for rank in self.ranks] for key in ("kernel_seconds", "peak_bytes")}

    @property
    def summary(self) -> Any:
        """Return the content of summary.json."""
        return json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))

    @property
    def metrics(self) -> list[Line]:
        """Return the lines of metrics.jsonl."""
        return kept(self.run_dir / "metrics.jsonl")


def perform(
    module: str, *words: object, folder: str, ranks: int = RANKS, switches: Sequence[str] = (), run_dir: bool = True
) -> Finished:
    """Run a program to its end; its run directory is `folder`/run.

    Raises:
        RefusedError: it failed or hangs.
    """
    log, place = Path(folder) / "log.txt", Path(folder) / "run"
    launcher = ["mpirun", "-n", str(ranks), "--bind-to", "none", "--oversubscribe"] if ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "analysis.parts.measured_rank", *switches, folder, module]
    command += [*map(str, words), *(["--run-dir", str(place)] if run_dir else [])]
    start = time.perf_counter()
    code = follow(command, log, timeout=TIMEOUT)
    taken = time.perf_counter() - start
    if code != 0:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
        raise RefusedError(f"{' '.join(command)} ended with exit code {code}: {' / '.join(last)}")
    found = [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return Finished(taken, found, place)


def train(site: Site, name: str, *, side: int, batch: int) -> list[object]:
    """Return the words of `hvfreeze train` for one epoch after another of the photographs at 256 pixels."""
    fixed = "--data imagefolder --optimizer sgd --augment none --checkpoint-every 0 --quiet".split()
    sizes = ["--image-size", side, "--batch-size", batch]
    return ["train", *fixed, "--data-dir", site.small, *MODELS[name], *sizes]


def train_steps(site: Site, name: str, *, steps: int, ranks: int = RANKS) -> list[object]:
    """Return the words of `hvfreeze train` for about this number of steps."""
    scale = site.scale
    most = int(0.8 * scale.photographs) // (ranks * scale.batch)
    samples = ranks * scale.batch * max(1, min(steps, most))
    epochs = max(1, steps * ranks * scale.batch // samples)
    counts = ["--train-samples", samples, "--epochs", epochs, "--evaluate-every", epochs]
    return [*train(site, name, side=scale.side, batch=scale.batch), *counts]


def measure_allocator(run: Planned, site: Site) -> dict[str, Any]:
    """Return the training time, with glibc's default allocator or with memory that is kept."""
    words = train_steps(site, run.name, steps=site.scale.allocated[run.name])
    with tempfile.TemporaryDirectory() as folder:
        switches = ["--default-allocator"] if run.way == BEFORE else []
        done = perform("hvfreeze.__main__", *words, folder=folder, switches=switches)
        return {"seconds": done.summary["train_seconds"], "steps": done.summary["steps"], **done.of_ranks}


def measure_decoding(run: Planned, site: Site) -> dict[str, Any]:
    """Return the seconds of decoding all photographs into memory, or of `hvfreeze predict` on all of them."""
    switches = ["--whole-images"] if run.way == BEFORE else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "decoded.json"
        if run.name == "prepare":
            words = (site.large, site.scale.side, out)
            perform("analysis.parts.photographs", *words, folder=folder, ranks=1, switches=switches, run_dir=False)
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return found
        done = predict(site, model_of(site), folder=folder, switches=switches)
        return {"seconds": done.seconds, **done.of_ranks}


def model_of(site: Site) -> Path:
    """Return the run directory of a model to predict with, trained for a step unless it is there."""
    folder = site.work / "model"
    if not (folder / "run" / "summary.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = train(site, site.scale.lite, side=site.scale.side, batch=4)
        perform("hvfreeze.__main__", *words, "--epochs", 1, folder=str(folder))
    return folder / "run"


def predict(site: Site, model: Path, *images: Path, folder: str, switches: Sequence[str] = ()) -> Finished:
    """Predict the classes of all photographs, or of some."""
    words = ("predict", model, *(images or [site.large]), "--out", Path(folder) / "predictions.csv")
    return perform("hvfreeze.__main__", *words, folder=folder, ranks=1, switches=switches, run_dir=False)


def measure_command(run: Planned, site: Site) -> dict[str, Any]:
    """Return the seconds of `hvfreeze auto` by phase, and those of `hvfreeze predict` on the same photographs."""
    scale, small = site.scale, run.way == SMALL
    images = site.small if small else site.large
    weights = [] if site.weights is None else ["--weights", site.weights]
    words = ["auto", images, *MODELS[scale.lite], *weights, "--image-size", scale.side, "--quiet"]
    switches = ["--default-allocator", "--whole-images"] if run.way == BEFORE else []
    with tempfile.TemporaryDirectory() as folder:
        done = perform("hvfreeze.__main__", *words, folder=folder, switches=switches)
        found = {"seconds": done.seconds, "phases": phases_of(done), **done.of_ranks}
        one = next(iter(sorted(images.glob("test/*/*"))))
        for name, some in (("predict_start", [one]), ("predict_seconds", [images])):
            found[name] = predict(site, done.run_dir, *some, folder=folder, switches=switches).seconds
        return {**found, "test_accuracy": done.summary["test_accuracy"]}


def phases_of(done: Finished) -> dict[str, float]:
    """Return the seconds of a run of `hvfreeze auto` by phase; `launch` is what no phase of the run has."""
    found = dict(done.summary["set_up_seconds"])
    for line in done.metrics:
        spent = dict(line["seconds"])
        own = {"evaluation": spent.pop("evaluate"), "saving": spent.pop("checkpoint")}
        fit = spent.pop("optimizer") if line.get("verb") == "solve" else 0.0
        name = {"solve": "features", "probe": "trial"}.get(line.get("verb", ""), "fine-tuning")
        for phase, value in {**own, "fit": fit, name: sum(spent.values())}.items():
            found[phase] = found.get(phase, 0.0) + value
    found["saving"] += done.summary["seconds"]["checkpoint"] - sum(
        line["seconds"]["checkpoint"] for line in done.metrics
    )
    return {**found, "launch": done.seconds - sum(found.values())}


def measure_large(run: Planned, site: Site) -> dict[str, Any]:
    """Return the seconds of single steps of a larger network, and the peak memory of each rank."""
    scale = site.scale
    words = train(site, run.name, side=scale.large_side, batch=scale.large_batch)
    words += ["--train-samples", RANKS * scale.large_batch, "--epochs", scale.large_steps]
    words += ["--evaluate-every", scale.large_steps]
    frozen = ["--freeze", "static", "--cut", CUT]
    words += {"frozen": frozen, "cached": [*frozen, "--cache", "on"]}.get(run.way, ["--freeze", "none"])
    module = RIVALS[run.way][1] if run.way in RIVALS else "hvfreeze.__main__"
    switches = ["--default-allocator"] if run.way in RIVALS else []
    with tempfile.TemporaryDirectory() as folder:
        done = perform(module, *words, folder=folder, switches=switches)
        steps = [
            line["train_seconds"] - line["seconds"].get("checkpoint", 0.0) for line in done.metrics if "epoch" in line
        ]
        return {"steps": steps[WARM_STEPS:], **done.of_ranks}


MEASURES: Mapping[str, Callable[[Planned, Site], dict[str, Any]]] = {
    "allocator": measure_allocator,
    "decoding": measure_decoding,
    "command": measure_command,
    "large": measure_large,
}
"""Part -> how a run of it is measured."""


def lines_of(lines: Sequence[Line], part: str, name: str = "", way: str = "") -> list[Line]:
    """Return the lines of a part, in the order of their numbers."""
    found = [line for line in lines if line["part"] == part and name in ("", line["name"]) and way in ("", line["way"])]
    return sorted(found, key=lambda line: int(line["number"]))


def ratio(lines: Sequence[Line], part: str, name: str, value: Callable[[Line], float]) -> Interval:
    """Return the median of now over before, over pairs of runs, with its bootstrap interval."""
    before, now = ({line["number"]: value(line) for line in lines_of(lines, part, name, way)} for way in (BEFORE, NOW))
    found = [now[number] / before[number] for number in sorted(before.keys() & now.keys())]
    if not found:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    return Interval(statistics.median(found), *bootstrap_interval(found), len(found))


def median_of(lines: Sequence[Line], value: Callable[[Line], float]) -> float:
    """Return the median of a number of some lines."""
    return statistics.median(value(line) for line in lines)


def own_seconds(line: Line) -> float:
    """Return the seconds of a line."""
    return float(line["seconds"])


def peak(line: Line) -> float:
    """Return the peak memory of the largest rank, in gigabytes."""
    return float(max(line["peak_bytes"])) / 1e9


def pair_table(lines: Sequence[Line]) -> str:
    """Return a row for each network of the allocator."""
    rows = []
    for name in dict.fromkeys(line["name"] for line in lines_of(lines, "allocator")):
        before, now = (lines_of(lines, "allocator", name, way) for way in (BEFORE, NOW))
        cells = [name, str(now[0]["steps"])]
        for value, unit in (
            (own_seconds, seconds),
            (lambda line: sum(line["kernel_seconds"]), seconds),
            (peak, lambda value: f"{value:.2f} GB"),
        ):
            cells.append(f"{unit(median_of(before, value))} -> {unit(median_of(now, value))}")
        rows.append((*cells, shown(ratio(lines, "allocator", name, own_seconds), factor, count=True)))
    columns = (
        "network",
        "steps",
        "training",
        "in the kernel, all ranks",
        "peak memory of a rank",
        "time, now / before",
    )
    return Table(columns=columns, rows=tuple(rows)).to_text()


def step_table(lines: Sequence[Line]) -> str:
    """Return a row for each larger network and way of training it."""
    rows = []
    names = {**STEPS_OF, **{way: called for way, (called, _) in RIVALS.items()}}
    for name in dict.fromkeys(line["name"] for line in lines_of(lines, "large")):
        for way, called in names.items():
            mine = lines_of(lines, "large", name, way)
            if mine:
                steps = [each for line in mine for each in line["steps"]]
                told = shown(mean_interval(steps), seconds, count=True)
                rows.append((name, called, told, f"{max(map(peak, mine)):.2f} GB"))
    return Table(columns=("network", "way", "step", "peak memory of a rank"), rows=tuple(rows)).to_text()


def phase_table(lines: Sequence[Line]) -> str:
    """Return a row for each phase of the whole command, a column for each way."""
    ways = {line["way"]: line for line in lines_of(lines, "command")}
    phases = dict.fromkeys(phase for line in ways.values() for phase in line["phases"])
    rows = [(phase, *(seconds(line["phases"].get(phase, 0.0)) for line in ways.values())) for phase in phases]
    rows.append(("auto, all", *(seconds(line["seconds"]) for line in ways.values())))
    rows.append(("predict, one image", *(seconds(line["predict_start"]) for line in ways.values())))
    rows.append(("predict, all", *(seconds(line["predict_seconds"]) for line in ways.values())))
    return Table(columns=("phase", *ways), rows=tuple(rows)).to_text()


GROUPS = {
    "start, model, saving": ("launch", "start", "other", "model", "saving"),
    "listing, headers": ("listing", "headers"),
    "decoding": ("decoding",),
    "duplicates, flips": ("duplicates", "flips"),
    "trial, fine-tuning": ("trial", "fine-tuning"),
    "features, fit": ("features", "fit"),
    "evaluation, prediction": ("evaluation", "predict"),
}
"""Colours of the figure, and the phases that each stands for."""


def command_figure(lines: Sequence[Line]) -> Figure:
    """Return the seconds of the whole commands by phase, a bar for each."""
    bars: dict[str, dict[str, float]] = {}
    for line in lines_of(lines, "command"):
        bars[f"auto, {line['way']}"] = line["phases"]
        own = {"start": line["predict_start"], "predict": line["predict_seconds"] - line["predict_start"]}
        bars[f"predict, {line['way']}"] = own
    colours = (OTHERS[5], COLOURS[4], COLOURS[1], COLOURS[3], COLOURS[0], COLOURS[5], COLOURS[2])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(FIGURE_WIDTH, 1.4 + 0.3 * len(bars)), layout="constrained")
        axes, left = figure.add_subplot(), [0.0] * len(bars)
        for (group, phases), colour in zip(GROUPS.items(), colours):
            widths = [sum(max(0.0, bar.get(phase, 0.0)) for phase in phases) for bar in bars.values()]
            axes.barh(range(len(bars)), widths, 0.7, left=left, color=colour, label=group)
            left = [before + width for before, width in zip(left, widths)]
        axes.set_yticks(range(len(bars)), list(bars))
        axes.set(xlabel="seconds of the whole command", ylim=(len(bars) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside upper left", ncols=2)
    return figure


def words(root: Path) -> Words:
    lines = kept(root / NAME / MEASURED)
    measured = {line["part"] for line in lines}

    def change(part: str, name: str) -> str:
        return shown(ratio(lines, part, name, own_seconds), factor, count=True)

    def step(name: str, way: str) -> float:
        return statistics.fmean(each for line in lines_of(lines, "large", name, way) for each in line["steps"])

    return {
        "measured": measured,
        "names": {part: dict.fromkeys(line["name"] for line in lines_of(lines, part)) for part in measured},
        "change": change,
        "took": lambda part, name, way: seconds(median_of(lines_of(lines, part, name, way), own_seconds)),
        "against": lambda name, way, other: factor(step(name, way) / step(name, other)),
        "command": {line["way"]: line for line in lines_of(lines, "command")},
        "pair_table": pair_table(lines),
        "step_table": step_table(lines),
        "phase_table": phase_table(lines),
        "told": "; source ".join(
            ", ".join(dict.fromkeys(line[key] for line in lines)) for key in ("machine", "commit")
        ),
    }


def drawings(root: Path) -> dict[str, Figure]:
    """Return the figure of the whole command, once it is measured."""
    lines = kept(root / NAME / MEASURED)
    return {"command": command_figure(lines)} if lines_of(lines, "command") else {}


PAGE = Page(NAME, words, drawings)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
