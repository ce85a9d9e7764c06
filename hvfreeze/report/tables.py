"""Tables about runs for a person: rows of text with units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvfreeze.config.tree import Config, to_dict
from hvfreeze.report.comparison import WITHOUT_EFFECT, Comparison, Group, Spread, compare, seeds
from hvfreeze.report.units import factor, megabytes, number, percent, plural, seconds, shown
from hvfreeze.runs.reading import TRAINING_PHASES, Run

RANKS_SHOWN = 8
"""With more ranks than this, equal ballots are counted instead of listed."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under column titles; the first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    folded: bool = False
    """Whether a page may hide it behind its title."""
    prose: frozenset[str] = frozenset()
    """Titles of the columns that hold text, not numbers."""

    def to_text(self) -> str:
        """Return the table with bars between aligned columns, which is a table in Markdown too."""
        cells = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        left = [i == 0 or title in self.prose for i, title in enumerate(self.columns)]
        lines = [
            "| " + " | ".join(f"{cell:<{w}}" if ok else f"{cell:>{w}}" for cell, w, ok in zip(row, widths, left)) + " |"
            for row in cells
        ]
        rule = "|".join(":" + "-" * (w + 1) if ok else "-" * (w + 1) + ":" for w, ok in zip(widths, left))
        return "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"


def group_label(group: Group) -> str:
    """Return the group's name, with the number of seeds, or of runs where some share one, and whether it has ended."""
    different = len({seeds(run) for run in group.runs}) == len(group.runs)
    parts = [plural(len(group.runs), "seed" if different else "run")] if len(group.runs) > 1 else []
    if not group.runs[0].finished:
        done = max(len(run.metrics) for run in group.runs)
        parts.append(f"not finished: {done} of {plural(group.runs[0].settings['epochs'], 'epoch')}")
    return group.name + (f" ({', '.join(parts)})" if parts else "")


def describe_freezing(run: Run) -> str:
    """Return how the run chose its cut."""
    settings = run.settings
    if settings["freeze"] == "static":
        return f"static, cut {settings['cut']}"
    weight = settings["vote_weight"]
    weighted = settings["freeze"] != "none" and weight != "uniform"
    return f"{settings['freeze']}, {weight} votes" if weighted else str(settings["freeze"])


def describe_cache(run: Run) -> str:
    """Return the cache mode asked for, and the one that came of it where that differs."""
    asked = str(run.settings["cache"])
    came = str(run.metrics[-1].get("cache", {}).get("mode", asked))
    return asked if came == asked else f"{asked}: {came}"


def summary_table(groups: Sequence[Group]) -> Table:
    """Return one row per group: what it was, and what came of it."""
    columns = ("Run", "Model", "Data", "Ranks", "Freeze", "Cache", "Accuracy", "Best accuracy", "Training time")
    more = ("Speed-up", "Time saved", "Images/s", "Allreduce", "Final cut")
    return Table(
        columns=(*columns, *more),
        rows=tuple(summary_row(group, compare(group, groups)) for group in groups),
        prose=frozenset(("Run", "Model", "Data", "Freeze", "Cache")),
    )


def summary_row(group: Group, comparison: Comparison | None) -> tuple[str, ...]:
    """Return a group's row of the summary."""
    run = group.runs[0]
    against = ("baseline", "baseline") if run.is_baseline else ("", "")
    if comparison is not None:
        against = (shown(comparison.speed_up, factor), shown(comparison.time_saved, percent))
    return (
        group_label(group),
        str(run.settings["model"]),
        str(run.settings["data"]),
        str(run.size),
        describe_freezing(run),
        describe_cache(run),
        shown(group.spread(lambda r: r.test_accuracy), percent),
        shown(group.spread(lambda r: r.best_accuracy), percent),
        shown(group.spread(lambda r: r.train_seconds), seconds),
        *against,
        shown(group.spread(lambda r: r.images_per_second), number),
        shown(group.spread(lambda r: r.allreduce_bytes), megabytes),
        shown(group.spread(lambda r: r.final_cut), number),
    )


def models_table(run: Run) -> Table:
    """Return one row per model of a run that trained several at once: how each did after the last epoch."""
    rows = []
    for name, scores in run.metrics[-1].get("models", {}).items():
        cells = [scores.get(key) for key in ("test_accuracy", "test_loss", "train_accuracy", "train_loss")]
        shown_as = (percent, number, percent, number)
        rows.append((name, *("" if value is None else show(value) for value, show in zip(cells, shown_as))))
    columns = ("Model", "Test accuracy", "Test loss", "Training accuracy", "Training loss")
    return Table(columns=columns, rows=tuple(rows), title=run.name)


def phase_table(groups: Sequence[Group]) -> Table:
    """Return seconds by phase, a row per phase that took any time, a column per group."""
    used = [p for p in TRAINING_PHASES if any(run.seconds[p] > 0 for group in groups for run in group.runs)]
    rows = [(phase, *(shown(phase_spread(group, phase), seconds) for group in groups)) for phase in used]
    total = ("all", *(shown(group.spread(lambda r: r.train_seconds), seconds) for group in groups))
    columns = ("Phase", *(group_label(group) for group in groups))
    return Table(columns=columns, rows=(*rows, total), prose=frozenset(("Phase",)))


def phase_spread(group: Group, phase: str) -> Spread:
    """Return a phase's seconds over the group's runs."""
    return group.spread(lambda run: run.seconds[phase])


def vote_table(run: Run) -> Table:
    """Return one row per vote: who proposed what with which weight, what that supported, and what came of it."""
    shadows = sorted({name for line in run.decisions for name in line.get("shadow", {})})
    columns = ("Vote", "Epoch", "Step", "Proposals", "Weights", "Support", "Quorum", "Cut", "Why")
    rows = [
        (*vote_row(number, line), *(shadow_cell(line, name) for name in shadows))
        for number, line in enumerate(run.decisions, 1)
    ]
    moves = sum(line["cut_after"] != line["cut_before"] for line in run.decisions)
    return Table(
        title=f"{run.name}: {plural(len(rows), 'vote')}, {plural(moves, 'change')} of the cut",
        columns=(*columns, *(f"Shadow {name}" for name in shadows)),
        rows=tuple(rows),
        prose=frozenset(("Support", "Why")),
    )


def vote_row(position: int, line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a vote's row, without the shadow criteria."""
    moved = line["cut_after"] != line["cut_before"]
    return (
        str(position),
        str(line["epoch"]),
        str(line["step"]),
        ballots([str(proposal) for proposal in line["proposals"]]),
        ballots([f"{weight:.3g}" for weight in line["weights"]]),
        support(line),
        percent(line["quorum"]),
        f"{line['cut_before']} → {line['cut_after']}" if moved else f"stays {line['cut_before']}",
        str(line["reason"]),
    )


def ballots(values: Sequence[str]) -> str:
    """Return one value per rank, in the order of ranks; for many ranks, how often each occurs."""
    if len(values) <= RANKS_SHOWN:
        return ", ".join(values)
    return ", ".join(f"{count} times {value}" for value, count in Counter(values).most_common())


def support(line: Mapping[str, Any]) -> str:
    """Return the share of the weight behind each cut that is deeper than the one before the vote."""
    deeper = range(line["cut_before"] + 1, len(line["tally"]))
    total = line["total"]
    shares = [f"cut {cut}: {percent(line['tally'][cut] / total)}" for cut in deeper if line["tally"][cut] > 0]
    return ", ".join(shares) or "none for a deeper cut"


def shadow_cell(line: Mapping[str, Any], name: str) -> str:
    """Return what a shadow criterion's cut would have been, and the proposals behind it."""
    scored = line.get("shadow", {}).get(name)
    return f"{scored['cut']} ({ballots([str(p) for p in scored['proposals']])})" if scored else ""


def command_table(groups: Sequence[Group]) -> Table:
    """Return for each group the flags that differ from the defaults."""
    rows = tuple((group_label(group), command(group.runs[0], num_runs=len(group.runs))) for group in groups)
    return Table(columns=("Run", "Command"), rows=rows, prose=frozenset(("Run", "Command")))


def command(run: Run, *, num_runs: int = 1) -> str:
    """Return the command that starts such a run."""
    words = ["hvfreeze train"]
    usual = {leaf: value for leaves in to_dict(Config()).values() for leaf, value in leaves.items()}
    for leaf, value in run.settings.items():
        if value != usual.get(leaf) and leaf not in WITHOUT_EFFECT:
            text = "..." if leaf in ("seed", "data_seed") and num_runs > 1 else str(value)
            words.append(f"--{leaf.replace('_', '-')}" + ("" if value is True else f" {text}"))
    return (f"horovodrun -np {run.size} " if run.size > 1 else "") + " ".join(words)


def environment_table(groups: Sequence[Group]) -> Table:
    """Return what the runs ran on, a row per fact, a column per environment that differs."""
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    for group in groups:
        for run in group.runs:
            facts = environment_facts(run)
            found.setdefault(repr(facts), (facts, []))[1].append(run.name)
    everywhere = list(found.values())
    names = list(dict.fromkeys(name for facts, _ in everywhere for name in facts))
    titles = ("all runs",) if len(everywhere) == 1 else tuple(", ".join(runs) for _, runs in everywhere)
    rows = tuple((name, *(facts.get(name, "") for facts, _ in everywhere)) for name in names)
    return Table(columns=("Environment", *titles), rows=rows, prose=frozenset(titles))


def environment_facts(run: Run) -> dict[str, str]:
    """Return the facts of environment.json as text, versions and hosts opened up."""
    facts: dict[str, str] = {}
    for key, value in run.environment.items():
        if key == "versions":
            facts.update({name: version or "not installed" for name, version in value.items()})
        elif key == "hosts":
            facts["hosts"] = ", ".join(f"{host} ({plural(n, 'rank')})" for host, n in Counter(value).items())
        elif key == "resumed":
            facts["resumed, not as before"] = "; ".join(what for time in value for what in time["changed"])
        else:
            facts["ranks" if key == "size" else key] = str(value)
    return facts
