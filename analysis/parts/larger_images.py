"""What freezing the study's groups saves of a step at larger images than the preset's: a few steps, time alone."""

from __future__ import annotations

from analysis.sweeps import paper
from analysis.sweeps.charts import OTHERS, Line
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, Values, paired_ratio, shown
from hvfreeze.report.tables import Table, factor

BATCHES = {224: 16}
"""Image size -> samples per rank: enough that the step's work, not the exchange, takes the time."""
CUTS = range(len(paper.SPEED_UP))
STEPS, EPOCHS = 3, 6
"""A few steps an epoch, of which the first epoch does not count."""


def runs(preset: Preset) -> list[PlannedRun]:
    """Return a run for every cut at every size; those of a size follow each other in time."""
    work: dict[str, Value] = {
        "epochs": EPOCHS,
        "validation_fraction": 0.1,
        "evaluate_every": EPOCHS,
        "augment": "none",
        "checkpoint_every": "0",
        "blocks": preset.coarse,
        "freeze": "static",
    }
    return [
        preset.run(label(size, cut), preset.seeds[0], {**work, **scale(preset, size), "cut": cut})
        for size in BATCHES
        for cut in CUTS
    ]


def scale(preset: Preset, size: int) -> dict[str, Value]:
    """Return the flags of an image size; a tenth of the samples is held out, for time is all that matters."""
    batch = BATCHES[size]
    return {"image_size": size, "batch_size": batch, "train_samples": preset.ranks * batch * (STEPS + 1)}


def label(size: int, cut: int) -> str:
    """Return the label of a cut at an image size."""
    return f"px{size}-groups{cut}"


def sizes(results: Results) -> list[int]:
    """Return the sizes of which all cuts were timed."""
    return [size for size in BATCHES if all(results.of(label(size, cut)) for cut in CUTS)]


def gain(results: Results, size: int, cut: int) -> Interval:
    """Return the speed-up of a step, paired by epoch: one run each."""
    frozen, full = (epoch_seconds(results, label(size, which)) for which in (cut, 0))
    return paired_ratio(full, frozen)


def epoch_seconds(results: Results, label: str) -> Values:
    """Return the training seconds of each epoch after the first of a label's first run."""
    return {int(line["epoch"]): float(line["train_seconds"]) for line in results.runs_of(label)[0].metrics[1:]}


def table(results: Results) -> Table:
    """Return the speed-ups by cut and size, beside the study's."""
    timed = sizes(results)
    rows = tuple(
        (str(cut), *(shown(gain(results, size, cut), factor) for size in timed), factor(paper.SPEED_UP[cut]))
        for cut in CUTS
    )
    columns = ("Frozen", *(f"{size} pixels, batch {BATCHES[size]}" for size in timed), "Study")
    title = f"Speed-up of a step at larger images; one run each, n = {EPOCHS - 1} epochs"
    return Table(title=title, columns=columns, rows=rows)


def lines(results: Results) -> list[Line]:
    """Return a line per size for the figure of speed-ups."""
    return [
        Line(
            label=f"here, {size} pixels, a few steps",
            points={cut: gain(results, size, cut) for cut in CUTS},
            colour=colour,
        )
        for size, colour in zip(sizes(results), OTHERS)
    ]
