"""A language model on a ring whose gradients are old: its loss by age and learning rate, and how long a step takes.

With K modules the first one's gradient is K - 1 steps old. A step of T_F forward and T_B backward should take
T_F + T_B / K in place of T_F + T_B. Adam is AdamW without weight decay.
Source: Yang et al., "Ouroboros: On Accelerating Training of Transformer-Based Language Models", arXiv 1909.06695.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from matplotlib.figure import Figure

from analysis.sweeps.charts import OTHERS, Line, line_chart
from analysis.sweeps.pages import Words, milliseconds
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, of_seeds, paired_ratio, shown
from hvfreeze.report.tables import Table
from hvfreeze.runs.reading import Run

MODEST, HIGH = 0.00025, (0.001, 0.003, 0.01)
"""Learning rates: the paper's, with its cosine decay and a warm-up, and others, which stay constant."""
RATES = (MODEST, *HIGH)
PARTS, SMOKE_PARTS = (1, 3, 4), (1, 2)
"""Modules; 1 is plain backpropagation in one process."""
BATCH, CONTEXT, STEPS, MODEST_STEPS = 8, 32, 400, 1200
TIMED_PARTS, TIMED_STEPS = 3, 28
TIMED: dict[str, dict[str, Value]] = {
    "plain": {"strategy": "replicas", "model": "tiny-lm"},
    "new": {"strategy": "stale-ring", "parts": TIMED_PARTS, "stale_after": 10**6},
    "stale": {"strategy": "stale-ring", "parts": TIMED_PARTS, "stale_after": 0},
}
"""Names by label: one process, the ring with undelayed gradients, and the ring with delayed ones."""


def planned(preset: Preset) -> list[PlannedRun]:
    """Return the runs; methods with a large effect or none have one seed."""
    seed = preset.seeds[0]
    if preset.is_smoke:
        losses = [run(preset, parts, MODEST, seed=seed) for parts in SMOKE_PARTS]
    else:
        losses = [run(preset, parts, rate, seed=seed) for rate in HIGH for parts in PARTS]
        losses += [run(preset, parts, MODEST, seed=other) for other in preset.seeds for parts in PARTS]
    # One seed's three runs follow each other, so that what slows the machine down slows all of them.
    return [*losses, *(timed(preset, label, seed=other) for other in preset.seeds for label in TIMED)]


def label_of(parts: int, rate: float) -> str:
    """Return the label of runs with so many modules and this learning rate."""
    return f"ring-{parts}-lr{rate:g}"


def run(preset: Preset, parts: int, rate: float, *, seed: int) -> PlannedRun:
    """Return a run that is about its loss."""
    steps = 4 if preset.is_smoke else MODEST_STEPS if rate == MODEST else STEPS
    flags = text_flags(batch=BATCH, context=CONTEXT, steps=steps, rate=rate)
    if rate == MODEST:
        flags |= {"schedule": "cosine", "lr_warmup": steps // 20}
    ring: dict[str, Value] = {"strategy": "stale-ring", "parts": parts}
    own = TIMED["plain"] if parts == 1 else ring
    return PlannedRun(label=label_of(parts, rate), seed=seed, flags={**flags, **own}, ranks=max(1, parts - 1))


def timed(preset: Preset, label: str, *, seed: int) -> PlannedRun:
    """Return a run that is about its time, of the strategy's own batches and windows."""
    flags = text_flags(batch=32, context=64, steps=4 if preset.is_smoke else TIMED_STEPS, rate=HIGH[0])
    ranks = 1 if label == "plain" else TIMED_PARTS - 1
    return PlannedRun(label=f"ring-time-{label}", seed=seed, flags={**flags, **TIMED[label]}, ranks=ranks)


def text_flags(*, batch: int, context: int, steps: int, rate: float) -> dict[str, Value]:
    """Return the flags of runs on text, a tenth of whose windows is held out."""
    return {
        "data": "text",
        "context": context,
        "augment": "none",
        "batch_size": batch,
        # A batch more, since held-out samples are rounded up.
        "train_samples": (steps + 1) * batch * 10 // 9,
        "validation_fraction": 0.1,
        "epochs": 1,
        "optimizer": "adamw",
        "lr": rate,
        "weight_decay": 0.0,
        "schedule": "constant",
        "checkpoint_every": "0",
        "threads": 1,
    }


def losses(results: Results, parts: int, rate: float) -> dict[int, float]:
    """Return the held-out loss in nats a character, by seed."""
    return results.of_runs(label_of(parts, rate), lambda run: float(run.metrics[-1]["test_loss"]))


def gap(results: Results, parts: int, rate: float) -> Interval:
    """Return the loss over that of backpropagation at the same learning rate."""
    return paired_ratio(losses(results, parts, rate), losses(results, 1, rate))


def times(results: Results, label: str, value: Callable[[Run], float]) -> dict[int, float]:
    """Return a number of each run that is about time, by seed."""
    return results.of_runs(f"ring-time-{label}", value)


def step_seconds(run: Run) -> float:
    """Return the seconds of a step."""
    return float(run.train_seconds / run.metrics[-1]["step"])


def predicted_seconds(run: Run, *, parts: int) -> float:
    """Return T_F + T_B / parts of a step, by the clock of one process; its update counts as backward."""
    steps, seconds = int(run.metrics[-1]["step"]), run.seconds
    forward, backward = seconds["data"] + seconds["forward"], seconds["backward"] + seconds["optimizer"]
    return (forward + backward / parts) / steps


def nats(value: float) -> str:
    """Return a loss."""
    return f"{value:.3f}"


def lost(ratio: float) -> str:
    """Return a ratio of losses as what it is above 1."""
    return f"{100 * (ratio - 1):+.1f} %"


def loss_table(results: Results) -> str:
    """Return losses by modules and learning rate."""
    rows = []
    for parts in PARTS:
        cells = [shown(of_seeds(losses(results, parts, rate)), nats) for rate in RATES]
        ratios = [shown(gap(results, parts, rate), lost) if parts > 1 else "-" for rate in RATES]
        rows.append((str(parts), *(text for pair in zip(cells, ratios, strict=True) for text in pair)))
    columns = ("Modules", *(text for rate in RATES for text in (f"Loss, Adam {rate:g}", "Against 1")))
    return Table(columns=columns, rows=tuple(rows)).to_text()


def step_table(results: Results) -> str:
    """Return measured and predicted seconds of a step."""
    whole, ideal = (
        of_seeds(times(results, "plain", partial(predicted_seconds, parts=parts))) for parts in (1, TIMED_PARTS)
    )
    told = [("one process", "plain", "-"), ("ring, new gradients", "new", milliseconds(whole.mean))]
    told.append(("ring, old gradients", "stale", milliseconds(ideal.mean)))
    rows = [
        (name, shown(of_seeds(times(results, label, step_seconds)), milliseconds), expected)
        for name, label, expected in told
    ]
    return Table(columns=("Run", "Step", "By the clock of one process"), rows=tuple(rows)).to_text()


def words(results: Results) -> Words:
    plain, new, stale = (times(results, label, step_seconds) for label in TIMED)
    whole, ideal = (times(results, "plain", partial(predicted_seconds, parts=parts)) for parts in (1, TIMED_PARTS))
    return {
        "high": HIGH,
        "lost": lambda parts, rate=MODEST, n=False: shown(gap(results, parts, rate), lost, count=n),
        "gain": paired_ratio(new, stale),
        "over_one": paired_ratio(plain, stale),
        "ideal": paired_ratio(whole, ideal),
        "losses": loss_table(results),
        "steps": step_table(results),
    }


def chart(results: Results) -> Figure:
    """Return the loss over the modules, a line for each learning rate."""
    lines = [
        Line(
            label=f"Adam, {rate:g}",
            points={parts: of_seeds(losses(results, parts, rate)) for parts in PARTS},
            colour=colour,
        )
        for rate, colour in zip(RATES, OTHERS)
    ]
    return line_chart(lines, x="modules K", y="held-out loss (nats a character)", from_zero=False)
