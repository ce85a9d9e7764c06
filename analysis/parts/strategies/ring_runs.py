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
from analysis.sweeps.experiment import Answer, Drawing
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, mean_interval, of_seeds, paired_ratio, shown
from hvfreeze.report.tables import Table, factor
from hvfreeze.runs.reading import Run

MODEST, HIGH = 0.00025, (0.001, 0.003, 0.01)
"""Learning rates: the paper's, with its cosine decay and a warm-up, and others, which stay constant."""
RATES = (MODEST, *HIGH)
PARTS, SMOKE_PARTS = (1, 3, 4), (1, 2)
"""Modules; 1 is plain backpropagation in one process."""
EVERY = tuple(sorted({*PARTS, *SMOKE_PARTS}))
BATCH, CONTEXT, STEPS, MODEST_STEPS = 8, 32, 400, 1200
TIMED_PARTS, TIMED_STEPS = 3, 28
TIMED: dict[str, dict[str, Value]] = {
    "plain": {"strategy": "replicas", "model": "tiny-lm"},
    "new": {"strategy": "stale-ring", "parts": TIMED_PARTS, "stale_after": 10**6},
    "stale": {"strategy": "stale-ring", "parts": TIMED_PARTS, "stale_after": 0},
}
"""By label: one process, the ring with new gradients, and the ring with old ones."""
MOST_LOST, LEAST_GAINED = 1.03, 1.3


def planned(preset: Preset) -> list[PlannedRun]:
    """Return the runs, of one seed where what is asked is large or nothing."""
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
    label = label_of(parts, rate)
    runs = results.runs_of(label) if results.of(label) else []
    return {run.settings["seed"]: float(run.metrics[-1]["test_loss"]) for run in runs}


def gap(results: Results, parts: int, rate: float) -> Interval:
    """Return the loss over that of backpropagation at the same learning rate."""
    return paired_ratio(losses(results, parts, rate), losses(results, 1, rate))


def times(results: Results, label: str) -> list[Run]:
    """Return the runs that are about time."""
    label = f"ring-time-{label}"
    return results.runs_of(label) if results.of(label) else []


def step_seconds(run: Run) -> float:
    """Return the seconds of a step."""
    return float(run.train_seconds / run.metrics[-1]["step"])


def predicted_seconds(run: Run, *, parts: int) -> float:
    """Return T_F + T_B / parts of a step, by the clock of one process; its update counts as backward."""
    steps, seconds = int(run.metrics[-1]["step"]), run.seconds
    forward, backward = seconds["data"] + seconds["forward"], seconds["backward"] + seconds["optimizer"]
    return (forward + backward / parts) / steps


def by_seed(runs: list[Run], value: Callable[[Run], float]) -> dict[int, float]:
    """Return a number of each run by its seed."""
    return {run.settings["seed"]: value(run) for run in runs}


def answers(results: Results) -> list[Answer]:
    """Return what old gradients cost and bring."""
    found = []
    modest = {parts: gap(results, parts, MODEST) for parts in EVERY[1:] if gap(results, parts, MODEST).n}
    if modest:
        details = tuple(f"K = {parts}: {shown(ratio, lost)}" for parts, ratio in modest.items())
        parts = max(modest, key=lambda parts: modest[parts].mean)
        worst = modest[parts]
        text = (
            f"Held-out loss against backpropagation with Adam at {MODEST:g} and cosine decay, K = {parts}: "
            f"{shown(worst, lost, count=True)}."
        )
        question = "What do old gradients cost at a modest learning rate?"
        negative = worst.mean > MOST_LOST
        found.append(Answer(question=question, text=text, n=worst.n, negative=negative, details=details))
    high = {(parts, rate): gap(results, parts, rate) for rate in HIGH for parts in EVERY[1:]}
    measured = {point: ratio for point, ratio in high.items() if ratio.n}
    if measured:
        details = tuple(
            f"{rate:g}: "
            + ", ".join(f"{shown(ratio, lost)} (K = {parts})" for (parts, at), ratio in measured.items() if at == rate)
            for rate in dict.fromkeys(rate for _, rate in measured)
        )
        parts, rate = max(measured, key=lambda point: measured[point].mean)
        worst = measured[parts, rate]
        text = (
            f"Held-out loss against backpropagation with Adam at a constant {rate:g} after {STEPS} steps, K = {parts}: "
            f"{shown(worst, lost, count=True)}."
        )
        question = "What do old gradients cost at high learning rates?"
        negative = worst.mean > MOST_LOST
        found.append(Answer(question=question, text=text, n=worst.n, negative=negative, details=details))
    plain, new, stale = (by_seed(times(results, label), step_seconds) for label in TIMED)
    gain = paired_ratio(new, stale)
    if gain.n:
        whole, ideal = (
            by_seed(times(results, "plain"), partial(predicted_seconds, parts=parts)) for parts in (1, TIMED_PARTS)
        )
        text = (
            f"At K = {TIMED_PARTS} on {TIMED_PARTS - 1} ranks a step is {shown(gain, factor, count=True)} as fast as "
            "the same ring's with new gradients."
        )
        details = (
            f"It is {shown(paired_ratio(plain, stale), factor)} as fast as one process's.",
            f"(T_F + T_B) / (T_F + T_B / K) is {shown(paired_ratio(whole, ideal), factor)}.",
        )
        question = "Is a step of a ring with old gradients faster?"
        slow = gain.mean < LEAST_GAINED
        # One pair on a busy machine shows nothing.
        found.append(Answer(question, text, gain.n, negative=slow, undecided=gain.n == 1, details=details))
    return found


def nats(value: float) -> str:
    """Return a loss."""
    return f"{value:.3f}"


def lost(ratio: float) -> str:
    """Return a ratio of losses as what it is above 1."""
    return f"{100 * (ratio - 1):+.1f} %"


def tables(results: Results) -> list[Table]:
    """Return losses by modules and learning rate, and seconds of a step beside the prediction."""
    found, rows = [], []
    for parts in EVERY:
        cells = [shown(of_seeds(losses(results, parts, rate)), nats) for rate in RATES]
        if any(cell != "not measured" for cell in cells):
            ratios = [shown(gap(results, parts, rate), lost) if parts > 1 else "-" for rate in RATES]
            rows.append((str(parts), *(text for pair in zip(cells, ratios, strict=True) for text in pair)))
    if rows:
        columns = ("Modules", *(text for rate in RATES for text in (f"Loss, Adam {rate:g}", "Against 1")))
        found.append(Table(title="Held-out loss of a ring, nats a character", columns=columns, rows=tuple(rows)))
    plain = times(results, "plain")
    if plain and times(results, "stale"):
        whole, ideal = (
            mean_interval([predicted_seconds(run, parts=parts) for run in plain]) for parts in (1, TIMED_PARTS)
        )
        told = [("one process", "plain", "-"), ("ring, new gradients", "new", milliseconds(whole.mean))]
        told.append(("ring, old gradients", "stale", milliseconds(ideal.mean)))
        rows = [
            (name, shown(mean_interval([step_seconds(run) for run in times(results, label)]), milliseconds), expected)
            for name, label, expected in told
        ]
        columns = ("Run", "Step", "By the clock of one process")
        found.append(Table(title=f"Seconds of a step, K = {TIMED_PARTS}", columns=columns, rows=tuple(rows)))
    return found


def milliseconds(value: float) -> str:
    """Return seconds in thousandths."""
    return f"{1000 * value:.0f} ms"


def drawings(results: Results) -> list[Drawing]:
    """Return the loss over the modules, a line for each learning rate."""
    lines = []
    for rate, colour in zip(RATES, OTHERS):
        points = {parts: of_seeds(losses(results, parts, rate)) for parts in EVERY if losses(results, parts, rate)}
        if points:
            lines.append(Line(label=f"Adam, {rate:g}", points=points, colour=colour))
    if not lines:
        return []
    figure: Figure = line_chart(lines, x="modules K", y="held-out loss (nats a character)", from_zero=False)
    caption = (
        f"Held-out loss of a ring of K modules after {STEPS} steps, with {MODEST:g} after {MODEST_STEPS}; K = 1 is "
        "backpropagation."
    )
    return [Drawing(name="ring-loss", caption=caption, figure=figure)]
