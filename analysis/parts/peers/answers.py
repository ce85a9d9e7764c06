"""What is made of the rows of `analysis.peers`: for each number of samples the front, and who is ahead of it."""

from __future__ import annotations

from dataclasses import replace

from analysis.parts.peers.labels import cell_of
from analysis.parts.peers.times import SOLVED, TIMED, timed
from analysis.sweeps.questions import Answer, Drawing
from analysis.sweeps.results import Results, with_front
from analysis.sweeps.statistics import is_below, shown, signed_points
from analysis.writing.ways import Way, ways_chart
from hvfreeze.report.tables import Table
from hvfreeze.report.units import factor, megabytes, percent, seconds

SLACK = 0.005
"""Half a point: who is as near as this to the best of full fine-tuning has reached it."""


WORDS = {
    "full": "full fine-tuning",
    "ddp": "full, by DDP over gloo",
    "smoothed": "full, labels smoothed",
    "last-stage": "last stage and head",
    "last-stage-cached": "last stage, cached",
    "head-cached": "head, cached",
    "lp-ft": "head, then full (LP-FT)",
    "voted": "frozen by vote",
    "autofreeze": "AutoFreeze, cached",
    "pipetransformer": "PipeTransformer, cached",
    "composer": "Composer's freezing",
    "exact": "linear head, solved",
    "auto": "--freeze auto",
    "auto-one-view": "auto, --mirror off",
}
"""Ways as a reader of a figure knows them."""


def in_words(label: str) -> str:
    """Return what a label's runs are, as the figure has it."""
    cell = cell_of(label)
    if cell.peer in SOLVED and cell.epochs == 1:
        return WORDS[cell.peer]
    return f"{WORDS.get(cell.peer, cell.peer)}, {cell.epochs} epoch{'' if cell.epochs == 1 else 's'}"


def by_samples(results: Results) -> list[tuple[int, Results]]:
    """Return for each number of samples its tested rows, held against full fine-tuning on as many."""
    tested = [row for row in timed(results).rows if not row["validation_fraction"]]
    found = []
    for samples in sorted({cell_of(str(row["label"])).samples for row in tested}):
        own = replace(results, rows=[row for row in tested if cell_of(str(row["label"])).samples == samples])
        full = sorted((label for label in own.labels if cell_of(label).peer == "full"), key=lambda b: cell_of(b).epochs)
        if full:
            found.append((samples, with_front(replace(own, reference=full[-1]), own, full)))
    return found


def best_full(results: Results) -> str:
    """Return the label of full fine-tuning that is the most accurate on average."""
    full = [label for label in results.labels if cell_of(label).peer == "full"]
    return max(full, key=lambda label: results.mean(label, "test_accuracy").mean)


def shortest(results: Results, *, full: bool) -> str | None:
    """Return the label that reaches the best of full fine-tuning, less half a point, in the shortest mean time."""
    wanted = results.mean(best_full(results), "test_accuracy").mean - SLACK
    there = [
        label
        for label in results.labels
        if results.mean(label, "test_accuracy").mean >= wanted and (cell_of(label).peer == "full") is full
    ]
    return min(there, key=lambda label: results.mean(label, "train_seconds").mean, default=None)


def answers_of(results: Results) -> list[Answer]:
    """Return for each number of samples how soon the best of full fine-tuning is reached, and by whom."""
    found = []
    for samples, own in by_samples(results):
        best, plain, other = best_full(own), shortest(own, full=True) or best_full(own), shortest(own, full=False)
        text = (
            f"Full fine-tuning reaches {shown(own.mean(best, 'test_accuracy'), percent, count=True)} after "
            f"{cell_of(best).epochs} epochs; within half a point of it after "
            f"{shown(own.mean(plain, 'train_seconds'), seconds)} ({cell_of(plain).epochs} epochs)"
        )
        if other is None:
            gain, text = None, f"{text}; nothing else gets there."
        else:
            gain = own.gain(other, plain)
            text += f"; the first of all others is {in_words(other)}, {shown(gain, factor)} as fast."
        leads = [(label, own.over_front(label)) for label in own.labels if cell_of(label).peer != "full"]
        ahead = [f"{in_words(label)} {shown(lead, signed_points)}" for label, lead in leads if lead.low > 0]
        text += f" Ahead of full fine-tuning trained for as many seconds: {'; '.join(ahead) or 'none for sure'}."
        n = own.mean(best, "test_accuracy").n
        negative = other is None or (gain is not None and is_below(gain, 1))
        model = own.rows[0].get("model", TIMED)
        question = f"Which way is the soonest as good as full fine-tuning, with {samples} samples?"
        if model != TIMED:
            question = question.replace("?", f" and {model}?")
        found.append(Answer(question=question, text=text, n=n, negative=negative))
    return found


def tables_of(results: Results) -> list[Table]:
    """Return for each number of samples every way and budget: time, accuracy, lead over the front, bytes."""
    columns = ("Way", "Learning rate", "Training time", "Test accuracy", "Full, trained as long", "Gradients", "Stored")
    found = []
    for samples, own in by_samples(results):
        rows = tuple(
            (
                own.shown_as(label),
                f"{own.of(label)[0]['lr']:g}",
                shown(own.mean(label, "train_seconds"), seconds),
                shown(own.mean(label, "test_accuracy"), percent, count=True),
                "" if cell_of(label).peer == "full" else shown(own.over_front(label), signed_points),
                megabytes(own.mean(label, "allreduce_bytes").mean),
                megabytes(own.mean(label, "cache_bytes").mean) if own.mean(label, "cache_bytes").n else "",
            )
            for label in own.labels
        )
        found.append(Table(title=f"{samples} samples", columns=columns, rows=rows))
    return found


def drawings_of(results: Results) -> list[Drawing]:
    """Return accuracy against time, a panel for each number of samples."""
    found = by_samples(results)
    if not found:
        return []
    labels = [label for _, own in found for label in own.labels]
    caption = (
        f"Accuracy against training time, a line from a way's smallest budget of epochs to its largest; mean and 95 % "
        f"interval, {results.count(labels)}."
    )
    panels = {f"{samples} training samples": ways_of(own) for samples, own in found}
    figure = ways_chart(panels, reference=WORDS["full"], ours=(WORDS["exact"], WORDS["auto"], WORDS["auto-one-view"]))
    return [Drawing(name="front", caption=caption, figure=figure)]


def ways_of(results: Results) -> list[Way]:
    """Return each way with its budgets, the smallest first."""
    labels = sorted(results.labels, key=lambda label: cell_of(label).epochs)
    found = []
    for peer in dict.fromkeys(cell_of(label).peer for label in results.labels):
        mine = [label for label in labels if cell_of(label).peer == peer]
        points = [(results.mean(label, "train_seconds"), results.mean(label, "test_accuracy")) for label in mine]
        found.append(Way(WORDS.get(peer, peer), points))
    return found
