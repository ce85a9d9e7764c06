"""Several models on one frozen trunk: the runs, compared with the cost model of the paper.

Baseline: every rank runs the whole trunk for its own model, F + H a batch. Split: F / N + H. So N models take
(F / N + H) / (F + H) of the time, which is below one half for three models with light heads only.
Source: McNeela, Patel, Gupta: "Efficient Distributed Transfer Learning Using Pipelined Model Parallelism".
"""

from __future__ import annotations

from typing import Any

import torch

from analysis.parts.strategies.grid_runs import chain_of, image_of
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, mean_interval, paired_ratio, shown
from hvfreeze.report.tables import Table, factor, megabytes, seconds
from hvfreeze.runs.reading import Run
from hvfreeze.strategies.model_parallel import dry_run

RANKS = 3
BATCH = 32
STEPS, HEAVY_STEPS = 120, 40
BATCHES = (8, 16, 64, 128)
LABELS = ("ride", "direct", "replay")
BACKWARD_OF_HEAD = 1.5
"""A head's forward pass is taken for half of its backward pass, which alone has a clock."""


def planned(preset: Preset) -> list[PlannedRun]:
    """Return the runs; their learning rate and accuracy do not matter here."""
    split: dict[str, Value] = {"heads": RANKS}
    whole: dict[str, Value] = {**split, "trunk": "whole"}
    # A ResNet's last stage, two blocks, and its last layer.
    heavy: dict[str, Value] = {"head_blocks": 3, "train_samples": samples(HEAVY_STEPS)}
    if preset.is_smoke:
        cached: dict[str, Value] = {**split, "augment": "none", "cache": "on", "epochs": 2}
        return [run(preset, *each, seed=0) for each in (("whole", whole), ("split", split), ("cached", cached))]
    runs = []
    for seed in preset.seeds:
        for label, changes in (("whole", whole), ("split", split)):
            runs += [
                run(preset, label, changes, seed=seed),
                run(preset, f"{label}-heavy", {**changes, **heavy}, seed=seed),
            ]
        runs += [run(preset, f"labels-{way}", {**split, "labels": way}, seed=seed) for way in LABELS[:2]]
    runs += [run(preset, f"batch{size}", {**split, "batch_size": size}, seed=0) for size in BATCHES]
    runs.append(run(preset, "by-params", {**split, "cut_by": "params"}, seed=0))
    runs.append(run(preset, "cached", {**split, "augment": "none", "cache": "on", "epochs": 3}, seed=0))
    return runs


def run(preset: Preset, label: str, changes: dict[str, Value], *, seed: int) -> PlannedRun:
    """Return a run of the trunk's part of the experiment."""
    flags: dict[str, Value] = {
        **preset.common(),
        "strategy": "shared-trunk",
        # Stages are few: they cannot be shared out evenly, and the line goes at the pace of its slowest rank.
        "blocks": preset.coarse if preset.is_smoke else preset.fine,
        "image_size": 32 if preset.is_smoke else 64,
        "batch_size": 8 if preset.is_smoke else BATCH,
        "train_samples": 64 if preset.is_smoke else samples(STEPS),
        "validation_fraction": 0.125,
        "epochs": 1,
        "schedule": "constant",
        "checkpoint_every": "0",
    }
    return PlannedRun(label=f"trunk-{label}", seed=seed, flags={**flags, **changes}, ranks=RANKS)


def samples(steps: int) -> int:
    """Return how many samples make so many steps when an eighth of them is held out."""
    return steps * BATCH * 8 // 7


def runs_with(results: Results, label: str) -> list[Run]:
    """Return the kept runs of a label."""
    return results.runs_of(f"trunk-{label}")


def trunk_of(run: Run) -> dict[str, Any]:
    """Return what a run's summary tells of its trunk."""
    found: dict[str, Any] = (run.summary or {})["trunk"]
    return found


def cpu_seconds(run: Run) -> float:
    """Return the processor seconds of all ranks in training."""
    return float(sum(trunk_of(run)["cpu_seconds"]))


def predicted_bytes(run: Run) -> dict[str, int]:
    """Return what the formula says that all ranks sent, by lane.

    A batch sends the boundaries between segments, and the features to every rank that has not computed them itself.
    """
    settings, trunk = run.settings, trunk_of(run)
    chain = chain_of(run, scheme=settings["blocks"])
    chain.model.eval()
    depth = len(chain.blocks) - (settings["head_blocks"] or 1)
    boundaries = dry_run(chain.run, image_of(run), depth=depth)
    samples, models = max(trunk["forwards"]) * settings["batch_size"], settings["heads"]
    inner = [stop for _, stop in trunk["segments"][:-1]]
    # Each rank has one head, the last of the line its own features.
    labels = {"replay": 0, "direct": models - 1, "ride": len(inner) * models + models - 1}[trunk["labels"]]
    return {
        "activations": samples * sum(boundaries[stop].num_bytes for stop in inner),
        "features": samples * (models - 1) * boundaries[depth].num_bytes,
        "labels": samples * labels * torch.int64.itemsize,
    }


def predicted_ratio(results: Results, suffix: str = "") -> Interval:
    """Return (F/N + H) / (F + H), with F and H from the clocks of the whole trunk's runs."""
    ratios = []
    for run in runs_with(results, f"whole{suffix}"):
        head = BACKWARD_OF_HEAD * run.seconds["backward"] + run.seconds["optimizer"]
        trunk = run.seconds["forward"] + run.seconds["backward"] + run.seconds["optimizer"] - head
        ratios.append((trunk / RANKS + head) / (trunk + head))
    return mean_interval(ratios)


def cpu_ratio(results: Results, suffix: str = "") -> Interval:
    """Return the split trunk's processor seconds over the whole trunk's, paired by seed."""
    ours, theirs = (results.of_runs(f"trunk-{kind}{suffix}", cpu_seconds) for kind in ("split", "whole"))
    return paired_ratio(ours, theirs)


def memory_ratios(results: Results, suffix: str = "") -> str:
    """Return for each rank the split trunk's peak memory over the whole trunk's, paired by seed."""
    ours, theirs = (
        results.of_runs(f"trunk-{kind}{suffix}", lambda run: trunk_of(run)["peak_memory_bytes"])
        for kind in ("split", "whole")
    )
    ranks = range(min(len(peaks) for peaks in [*ours.values(), *theirs.values()]))
    each = [paired_ratio(*({seed: of[rank] for seed, of in side.items()} for side in (ours, theirs))) for rank in ranks]
    return ", ".join(shown(ratio, factor) for ratio in each)


def table(results: Results) -> str:
    """Return every kind of run with what it took and sent."""
    rows = []
    for label in (label.removeprefix("trunk-") for label in results.labels if label.startswith("trunk-")):
        of = runs_with(results, label)
        run, trunk = of[0], trunk_of(of[0])
        sent = trunk["wire_bytes"]
        split = trunk["mode"] == "split" and run.settings["cache"] == "off"
        peaks = (run.metrics[-1]["trunk"]["peak_memory_bytes"], trunk["peak_memory_bytes"])
        rows.append(
            (
                label,
                shown(mean_interval([r.train_seconds for r in of]), seconds),
                shown(mean_interval([cpu_seconds(r) for r in of]), seconds),
                shown(mean_interval([max(trunk_of(r)["wait_seconds"]) for r in of]), seconds),
                " ".join(map(megabytes, trunk["trunk_bytes"])),
                " ".join(f"{number:.1f} s" for number in trunk.get("forward_seconds", [])),
                *(" ".join(map(megabytes, each)) for each in peaks),
                megabytes(sum(sent.values())),
                "-" if not split else "yes" if sent == predicted_bytes(run) else "NO",
            )
        )
    columns = ("Run", "Training time", "Processor, all ranks", "Longest wait", "Trunk by rank", "Forward by rank")
    more = ("Peak memory by rank, training", "And to the end", "Sent", "As predicted")
    return Table(columns=(*columns, *more), rows=tuple(rows)).to_text()


def words(results: Results) -> Words:
    def labels(way: str) -> tuple[int, Interval]:
        runs = runs_with(results, "split" if way == "replay" else f"labels-{way}")
        return trunk_of(runs[0])["wire_bytes"]["labels"], mean_interval([run.train_seconds for run in runs])

    (cached,) = runs_with(results, "cached")
    sums = [sum(line["trunk"]["wire_bytes"].values()) for line in cached.metrics]
    return {
        "time": lambda suffix: results.ratio(f"trunk-whole{suffix}", f"trunk-split{suffix}"),
        "predicted": lambda suffix: predicted_ratio(results, suffix),
        "processor": lambda suffix: cpu_ratio(results, suffix),
        "memory": lambda suffix: memory_ratios(results, suffix),
        "labels": labels,
        "silent": [now - before for before, now in zip([0, *sums], sums)],
        "table": table(results),
    }
