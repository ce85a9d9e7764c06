"""What `analysis.chosen_features` found, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.sweeps.provenance import commit
from analysis.sweeps.statistics import Interval, Values, is_below, of_seeds, paired_difference, shown, signed_points
from hvfreeze.report.units import percent
from hvfreeze.runs.environment import facts_of_this_rank

Rows = Sequence[dict[str, str]]
WORDS = {"compared": "compares rows (`kernel`)", "linear": "linear (`exact`)"}


def values(rows: Rows, features: str, head: str) -> Values:
    """Return accuracies by seed."""
    wanted = {"features": features, "head": head}
    return {int(row["seed"]): float(row["accuracy"]) for row in rows if wanted.items() <= row.items()}


def gain(rows: Rows, features: str, head: str, *, over: str) -> Interval:
    """Return the change of accuracy against other features, paired by seed."""
    return paired_difference(values(rows, features, head), values(rows, over, head))


def verdict(change: Interval) -> str:
    """Return what a change of accuracy shows."""
    if is_below(change, 0):
        return "worse (negative)"
    return "better" if change.low > 0 else "no difference shown"


def table(rows: Rows) -> str:
    """Return every choice of features with both heads, against all features of the frozen network."""
    lines = ["| features | their number | head | test accuracy | against all | shown |", "|---|---:|---|---:|---:|---|"]
    for name in dict.fromkeys(row["features"] for row in rows):
        for head in WORDS:
            width = next(row["width"] for row in rows if row["features"] == name)
            accuracy = shown(of_seeds(values(rows, name, head)), percent, count=True)
            change = gain(rows, name, head, over="all")
            told = ("", "") if name == "all" else (shown(change, signed_points), verdict(change))
            lines.append(f"| {name} | {width} | {WORDS[head]} | {accuracy} | {' | '.join(told)} |")
    return "\n".join(lines)


def answers(rows: Rows) -> str:
    """Return both questions answered, for the head that `--freeze auto` takes."""
    lines = []
    for head, words in WORDS.items():
        fewer = [name for name in dict.fromkeys(row["features"] for row in rows) if "lasso" in name]
        told = ", ".join(f"{name} {shown(gain(rows, name, head, over='all'), signed_points)}" for name in fewer)
        both = shown(gain(rows, "tuned and frozen", head, over="tuned"), signed_points)
        lines.append(f"- A head that {words}" if head == "compared" else f"- A head that is {words}")
        lines[-1] += f": against all features {told}; features of before tuning beside those of after {both}."
    return "\n".join(lines)


def readme(rows: Rows) -> str:
    """Return README.md."""
    known = facts_of_this_rank()
    return (
        "# Fewer features, and features of before and after tuning\n\n"
        f"{answers(rows)}\n\n{table(rows)}\n\n"
        "## Limits\n\n"
        "- CIFAR-10 at 32 pixels, 5 000 samples and their mirror images, one network that was trained on CIFAR-100.\n"
        "- The group lasso has one strength; its features are ranked by the norm of their weights.\n"
        "- Heads on tuned features take the penalty chosen for frozen ones: their held-out samples were learnt from.\n"
        "- Accuracies only; fewer features save no pass through the network, and a solution's time is small.\n\n"
        "## How it was made\n\n"
        "- `python -m analysis.chosen_features --data-dir DIR --weights resnet18-cifar100-32px-fp16.pt`\n"
        f"- {known['processor']}, {known['cores']} cores; torch {known['versions']['torch']}; source {commit()}\n"
        "- numbers: [rows.csv](rows.csv)\n"
    )
