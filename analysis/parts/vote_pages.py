"""What a page says of the replayed rules of voting: a table for each criterion, a figure, and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from analysis.parts.vote_log import RANKS
from analysis.parts.vote_rules import QUORUMS, WEIGHTINGS, default
from analysis.parts.vote_study import (
    DIVERGES,
    EVERY,
    GROUPS,
    RULES,
    TRAINED,
    accuracies,
    called,
    diverging,
    interval_of,
    rows_of,
    trained_rows,
)
from analysis.sweeps.charts import FIGURE_WIDTH, OTHERS
from analysis.sweeps.statistics import NOTHING, Interval, paired_difference, shown, signed_points
from hvfreeze.report.figures import STYLE
from hvfreeze.report.tables import Table, percent

COLUMNS = ("Rule", "Too early", "Too late", "Work saved", "Gain forgone", "Beyond uniform", "Accuracy")
Texts = Mapping[str, str]


def tables(folder: Path) -> list[Table]:
    """Return a table for each criterion, nothing where no rule was replayed."""
    found = []
    for criterion, min_gain in GROUPS:
        rows = rows_of(folder / RULES, criterion, min_gain)
        cells = [cells_of(folder, row) for row in rows]
        if cells:
            frozen = sum(int(row["frozen_runs"]) for row in rows)
            title = (
                f"{called(criterion, min_gain)}: votes too early or too late by hindsight, all skews together; "
                f"something froze in {frozen} of {sum(int(row['runs']) for row in rows)} replays. Beyond "
                "uniform: gain forgone against uniform weights that save as much work. Accuracy: against the default "
                "rule, where a rule differs enough to be trained with."
            )
            found.append(Table(title=title, columns=COLUMNS, rows=tuple(cells)))
    return found


def cells_of(folder: Path, row: Texts) -> tuple[str, ...]:
    """Return a rule's row."""
    intervals = [interval_of(row, name) for name in ("early", "late", "saved", "forgone")]
    change = gained(folder, row)
    return (
        row["rule"],
        *(shown(interval, percent) for interval in intervals),
        "" if row["rule"].startswith("uniform") else shown(interval_of(row, "excess"), signed_points),
        shown(change, signed_points) if change.n else "",
    )


def gained(folder: Path, row: Texts, skew: str = EVERY) -> Interval:
    """Return the accuracy of runs trained by a rule minus that of runs trained by the default, paired by seed."""
    criterion, min_gain = row["criterion"], float(row["min_gain"])
    first = default(criterion, min_gain).name
    ours, theirs = (trained_rows(folder / TRAINED, criterion, min_gain, name, skew) for name in (row["rule"], first))
    return (
        paired_difference(accuracies(ours), accuracies(theirs)) if row["rule"] != first else paired_difference({}, {})
    )


def against_full(folder: Path, criterion: str, min_gain: float) -> Interval:
    """Return the accuracy of runs trained by the default rule minus that of runs in which nothing froze."""
    rows = trained_rows(folder / TRAINED, criterion, min_gain, default(criterion, min_gain).name)
    return paired_difference(accuracies(rows), accuracies(rows, "full"))


def trade(folder: Path) -> Figure:
    """Return what rules save against what they forgo, a panel for each criterion that froze anything."""
    groups = [(group, rows_of(folder / RULES, *group)) for group in GROUPS]
    groups = [(group, rows) for group, rows in groups if freezes(rows)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(FIGURE_WIDTH, 0.85 * FIGURE_WIDTH), layout="constrained")
        for axes, (group, rows) in zip(figure.subplots(1, max(1, len(groups)), squeeze=False)[0], groups):
            for weighting in WEIGHTINGS:
                own = [row for row in rows if row["rule"].startswith(f"{weighting},")]
                colour, label = (OTHERS[1], weighting) if weighting == "uniform" else (OTHERS[0], "other weights")
                axes.plot(*points(own), color=colour, marker="o", markersize=4, label=label)
            alone = [row for row in rows if "," not in row["rule"]]
            for row, marker, colour in zip(alone, "x+*", OTHERS[2:]):
                axes.plot(*points([row]), marker, color=colour, markersize=8, label=row["rule"])
            axes.set(title=called(*group), xlabel="work saved (%)", xlim=(0, None), ylim=(0, None))
        figure.axes[0].set_ylabel("gain forgone (%)")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        named = dict(zip(labels, handles))
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3)
        return figure


def usual(folder: Path) -> Texts:
    """Return the row of the program's default rule."""
    return rows_of(folder / RULES, *GROUPS[0])[0]


def points(rows: Sequence[Texts]) -> tuple[list[float], list[float]]:
    """Return what rules save and forgo, in percent, the least first."""
    rows = sorted(rows, key=lambda row: float(row["saved"]))
    return [100 * float(row["saved"]) for row in rows], [100 * float(row["forgone"]) for row in rows]


def said(folder: Path) -> tuple[str, ...]:
    """Return what else the replay says, nothing where there is none."""
    groups = [group for group in GROUPS if rows_of(folder / RULES, *group)]
    if not groups:
        return ()
    runs, seeds = (rows_of(folder / RULES, *GROUPS[0])[0][name] for name in ("runs", "seeds"))
    first = f"{runs} runs of {RANKS} ranks on digits, {seeds} seeds, replayed."
    return (first, *of_quorums(folder), *(line for group in groups for line in told(folder, *group)))


def of_quorums(folder: Path) -> tuple[str, str, str]:
    """Return what quorums and other rules save and forgo, and what quorums change in accuracy."""
    rows = {row["rule"]: row for row in rows_of(folder / RULES, *GROUPS[0])}
    name, quorums = called(*GROUPS[0]), [rows[f"uniform, {quorum:g}"] for quorum in QUORUMS]
    saved, forgone = (", ".join(percent(float(row[part])) for row in quorums) for part in ("saved", "forgone"))
    changes = {row["rule"]: gained(folder, row) for row in quorums}
    listed = "; ".join(f"{rule} {shown(each, signed_points, count=True)}" for rule, each in changes.items() if each.n)
    ends = [float(row["excess"]) for row in rows.values()]
    return (
        (
            f"With {name} quorums of {', '.join(f'{quorum:g}' for quorum in QUORUMS)} save {saved} of the blocks' "
            f"work and forgo {forgone} of the gain."
        ),
        (
            f"Other weights, rank 0 alone, a median and averaged gradients forgo {signed_points(min(ends))} to "
            f"{signed_points(max(ends))} against uniform weights that save as much."
        ),
        f"Accuracy against a quorum of one half: {listed or 'nothing trained yet'}.",
    )


def told(folder: Path, criterion: str, min_gain: float) -> list[str]:
    """Return one criterion's sentences: of rules that differ from the default in weights or quorum alone."""
    rows, name = rows_of(folder / RULES, criterion, min_gain), called(criterion, min_gain)
    if not freezes(rows):
        return [f"{name}: no rule froze anything."]
    early, late, saved = (shown(interval_of(rows[0], measure), percent) for measure in ("early", "late", "saved"))
    names = [rule.name for rule in diverging(folder / RULES)[1:] if called(rule.criterion, rule.min_gain) == name]
    listed = [f"{name}, {change_text(folder, row)}" for row in rows[1:] if row["rule"] in names]
    change = against_full(folder, criterion, min_gain)
    accuracy = f", accuracy {shown(change, signed_points, count=True)} against nothing frozen" if change.n else ""
    return [
        (
            f"{name}, uniform weights, quorum 0.5: too early in {early} of the votes, too late in {late}, work saved "
            f"{saved}{accuracy}. Rules that differ in weights or quorum alone, and by at least {percent(DIVERGES)}:"
        ),
        *(listed or ["none"]),
    ]


def change_text(folder: Path, row: Texts) -> str:
    """Return how a rule differs from the default."""
    early, late = (shown(interval_of(row, f"{measure}_change"), signed_points) for measure in ("early", "late"))
    change = gained(folder, row)
    accuracy = f", accuracy {shown(change, signed_points, count=True)}" if change.n else ""
    return f"{row['rule']} early {early}, late {late}{accuracy}"


KEEP = "Keep the defaults, uniform weights and a quorum of 0.5"


def trained_changes(folder: Path) -> list[tuple[str, Interval]]:
    """Return the rules that were trained with, by criterion, with their accuracy against the default's."""
    found = []
    for group in GROUPS:
        for row in rows_of(folder / RULES, *group)[1:]:
            change = gained(folder, row)
            if change.n > 1:
                way, _, quorum = row["rule"].partition(", ")
                weights = f"{way} weights and " if way != "uniform" else ""
                rule = f"{weights}a quorum of {quorum}" if quorum else way
                found.append((f"{rule} with {called(*group)}", change))
    return found


def advice(folder: Path) -> str:
    """Return which weights and quorum a user should choose, nothing where no rule was replayed."""
    if not rows_of(folder / RULES, *GROUPS[0]):
        return ""
    changes = trained_changes(folder)
    best, worst = (pick(changes, key=lambda each: each[1].mean, default=("", NOTHING)) for pick in (max, min))
    if best[1].low > 0:
        return f"Choose {best[0]}: against the defaults {shown(best[1], signed_points, count=True)}."
    most = f"; {worst[0]}: {shown(worst[1], signed_points, count=True)}" if worst[1].high < 0 else ""
    return f"{KEEP}: nothing else is shown to be more accurate{most}."


def freezes(rows: Sequence[Texts]) -> bool:
    """Tell whether any rule froze anything."""
    return any(int(row["frozen_runs"]) for row in rows)
