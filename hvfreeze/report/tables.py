"""Tables about runs: rows of text with units, and the same as CSV."""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvfreeze.config.flags import words_of
from hvfreeze.config.tree import Config, given_in, settings_of
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.metrics import WORDS, in_words
from hvfreeze.report.comparison import WITHOUT_EFFECT, Group, Spread, compare, seeds
from hvfreeze.runs.reading import BALANCE, TRAINING_PHASES, Run
from hvfreeze.wording import MOST_NAMED, on_one_line, plural


def percent(value: float, digits: int = 1) -> str:
    """Return a fraction as a percentage, a dash if it is NaN."""
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f} %"


def accuracy_of(run: Run) -> str:
    """Return a run's accuracy or its metrics, with the balanced accuracy if classes are unbalanced."""
    if run.measured:
        return in_words({name: value for name, value in run.measured.items() if name != "accuracy"})
    balanced, majority = run.balance
    shown = percent(run.test_accuracy)
    return shown if majority is None else f"{shown} (balanced {percent(balanced or 0)}, majority {percent(majority)})"


def accuracy_of_group(group: Group) -> str:
    """Return the accuracy of a group's runs, with balanced accuracy and majority share if classes are unbalanced."""
    accuracy = shown(group.spread(lambda run: run.test_accuracy), percent)
    beside = optional_cells(group, [group])
    if "Majority class" not in beside:
        return accuracy
    return f"{accuracy} (balanced {beside.get('Balanced accuracy', '')}, majority {beside['Majority class']})"


def seconds(value: float) -> str:
    """Return seconds with three significant digits, and at most one decimal from 10 s on."""
    return f"{value:.0f} s" if value >= 1000 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def megabytes(value: float) -> str:
    """Return bytes as megabytes (10^6 bytes)."""
    return f"{value / 1e6:.0f} MB" if value >= 1e8 or value == 0 else f"{value / 1e6:.1f} MB"


def factor(value: float) -> str:
    """Return a ratio."""
    return f"{value:.2f}x"


def number(value: float) -> str:
    """Return a count or a rate with about three significant digits."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def shown(value: Spread, unit: Callable[[float], str]) -> str:
    """Return a mean, with lowest and highest in brackets if they differ."""
    low, high = (unit(end).rstrip(" %sxMB") for end in (value.low, value.high))
    return unit(value.mean) if low == high else f"{unit(value.mean)} ({low} to {high})"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under column titles; the first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    folded: bool = False
    """Whether a page collapses it."""
    prose: frozenset[str] = frozenset()
    """Titles of the columns with text instead of numbers."""

    def to_text(self) -> str:
        """Return the table as aligned Markdown, one line per row."""
        cells = [tuple(map(on_one_line, row)) for row in (self.columns, *self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        left = [i == 0 or title in self.prose for i, title in enumerate(self.columns)]
        lines = [
            "| " + " | ".join(f"{cell:<{w}}" if ok else f"{cell:>{w}}" for cell, w, ok in zip(row, widths, left)) + " |"
            for row in cells
        ]
        rule = "|".join(":" + "-" * (w + 1) if ok else "-" * (w + 1) + ":" for w, ok in zip(widths, left))
        return "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"


def table_of(rows: Sequence[Mapping[str, str]], *, title: str = "", prose: Sequence[str] = ()) -> Table:
    """Return a table of rows by column title; the first row has all columns."""
    columns = tuple(rows[0]) if rows else ()
    cells = tuple(tuple(row.get(column, "") for column in columns) for row in rows)
    return Table(columns=columns, rows=cells, title=title, prose=frozenset(prose))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Create the parent folder of `path`; raises RefusedError, which names it, on a failure to write there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error.strerror}; choose another --out") from error


def write_text(path: Path, text: str) -> None:
    """Write a file and create its folder; undecodable bytes of file names stay as they are.

    Raises:
        RefusedError: it cannot be written.
    """
    with writing(path):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))


def to_csv(rows: Sequence[Mapping[str, Any]], *, header: bool = True) -> str:
    """Return CSV with a column for every key that occurs, and a first line with their names if `header`."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [csv_line([row.get(column) for column in columns]) for row in rows]
    return "".join([csv_line(columns), *lines] if header else lines)


def csv_line(cells: Sequence[Any]) -> str:
    """Return a line of CSV; cells that contain line ends are quoted, as csv does with its own."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue().removesuffix("\r\n") + "\n"


def run_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return plain numbers of every run: seconds, bytes, accuracies 0-1."""
    rows = []
    for group in groups:
        for run in group.runs:
            comparison = compare(Group(run.name, (run,)), groups)
            row: dict[str, Any] = {"run": run.name, "group": group.name, "finished": run.finished, "ranks": run.size}
            row |= {leaf: run.settings[leaf] for leaf in ("model", "data", "freeze", "cut", "cache", "seed")}
            row |= {"test_accuracy": run.test_accuracy, "best_test_accuracy": run.best_accuracy}
            row |= dict(zip(BALANCE, run.balance)) | {f"test_{name}": run.measured[name] for name in run.measured}
            row |= {"epochs": len(run.epochs), "train_seconds": run.train_seconds}
            row["speed_up"] = comparison.speed_up.mean if comparison else None
            row["time_saved"] = comparison.time_saved.mean if comparison else None
            row |= {"images_per_second": run.images_per_second, "allreduce_bytes": run.allreduce_bytes}
            row["final_cut"] = run.final_cut
            rows.append(row | {f"seconds_{phase}": value for phase, value in run.seconds.items()})
    return rows


def epoch_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return every line of every metrics.jsonl with a column for each phase."""
    return [
        {
            "run": run.name,
            **{key: value for key, value in line.items() if not isinstance(value, dict)},
            **{f"seconds_{phase}": value for phase, value in line["seconds"].items()},
        }
        for group in groups
        for run in group.runs
        for line in run.metrics
    ]


def vote_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return every line of every decisions.jsonl; entries of lists are separated by spaces."""
    rows = []
    for name, line in ((run.name, line) for group in groups for run in group.runs for line in run.decisions):
        plain = {key: " ".join(map(str, v)) if isinstance(v, list) else v for key, v in line.items() if key != "shadow"}
        shadows = {f"shadow_{other}": scored["cut"] for other, scored in line.get("shadow", {}).items()}
        rows.append({"run": name, **plain, **shadows})
    return rows


def group_label(group: Group) -> str:
    """Return the group's name, with the number of seeds (or of runs if some share one), and its progress."""
    different = len({seeds(run) for run in group.runs}) == len(group.runs)
    parts = [plural(len(group.runs), "seed" if different else "run")] if len(group.runs) > 1 else []
    if not group.runs[0].finished:
        parts.append(f"not finished: {epochs_done(max(group.runs, key=lambda run: len(run.epochs)))}")
    return group.name + (f" ({', '.join(parts)})" if parts else "")


def epochs_done(run: Run) -> str:
    """Return the completed epochs of a run, and the planned ones if known."""
    done, planned = len(run.epochs), run.planned_epochs
    return plural(done, "epoch") if planned is None else f"{done} of {plural(planned, 'epoch')}"


def describe_run(run: Run) -> dict[str, str]:
    """Return how a run trained, by column: model, data, ranks, freezing, and the cache's mode.

    If the resulting mode of the cache differs from the requested one, both are shown.
    """
    settings, asked = run.settings, str(run.settings["cache"])
    freeze, weight = str(settings["freeze"]), settings["vote_weight"]
    if freeze == "static":
        freeze = f"static, cut {settings['cut']}"
    elif freeze != "none" and weight != "uniform":
        freeze = f"{freeze}, {weight} votes"
    came = str(run.metrics[-1].get("cache", {}).get("mode", asked))
    cache = asked if came == asked else f"{asked}: {came}"
    known = {"Model": str(settings["model"]), "Data": str(settings["data"]), "Ranks": str(run.size)}
    return {**known, "Freeze": freeze, "Cache": cache}


def summary_table(groups: Sequence[Group]) -> Table:
    """Return one row per group: its settings and results."""
    rows = []
    for group in groups:
        comparison = compare(group, groups)
        speed_up = time_saved = "baseline" if group.runs[0].is_baseline else ""
        if comparison is not None:
            speed_up, time_saved = shown(comparison.speed_up, factor), shown(comparison.time_saved, percent)
        rows.append(
            {
                "Run": group_label(group),
                **describe_run(group.runs[0]),
                "Accuracy": shown(group.spread(lambda r: r.test_accuracy), percent),
                **optional_cells(group, groups),
                "Best accuracy": shown(group.spread(lambda r: r.best_accuracy), percent),
                "Training time": shown(group.spread(lambda r: r.train_seconds), seconds),
                "Speed-up": speed_up,
                "Time saved": time_saved,
                "Images/s": shown(group.spread(lambda r: r.images_per_second), number),
                "Allreduce": shown(group.spread(lambda r: r.allreduce_bytes), megabytes),
                "Final cut": shown(group.spread(lambda r: r.final_cut), number),
            }
        )
    return table_of(rows, prose=("Run", "Model", "Data", "Freeze", "Cache"))


def optional_cells(group: Group, groups: Sequence[Group]) -> dict[str, str]:
    """Return the group's mean in each column that only some kinds of runs have; empty if no run of `groups` has any.

    These are balanced accuracy and the share of the majority class for imbalanced classes, the metrics that compare
    runs, and bits per character of text.
    """
    runs = [run for other in groups for run in other.runs]
    metrics = dict.fromkeys(name for run in runs for name in run.measured)
    columns: dict[str, tuple[Callable[[Run], float | None], Callable[[float], str]]] = {
        "Balanced accuracy": (lambda run: run.balance[0], percent),
        "Majority class": (lambda run: run.balance[1], percent),
        **{
            WORDS[name][:1].upper() + WORDS[name][1:]: (lambda run, name=name: run.measured.get(name), "{:.4g}".format)  # type: ignore[misc]
            for name in metrics
            if name not in ("accuracy", "balanced_accuracy")
        },
        "Bits per character": (lambda run: run.metrics[-1].get("test_bits_per_character"), "{:.3f}".format),
    }
    cells = {}
    for title, (value_of, unit) in columns.items():
        if any(value_of(run) is not None for run in runs):
            known = [value for run in group.runs if (value := value_of(run)) is not None]
            cells[title] = unit(sum(known) / len(known)) if known else ""
    return cells


def models_table(run: Run) -> Table:
    """Return one row per model of a run that trained several: the results after the last epoch."""
    found = run.metrics[-1].get("models", {})
    unequal = any("test_majority_share" in scores for scores in found.values())
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "Test accuracy": ("test_accuracy", percent),
        **({"Balanced accuracy": (BALANCE[0], percent), "Majority class": (BALANCE[1], percent)} if unequal else {}),
        "Test loss": ("test_loss", number),
        "Training accuracy": ("train_accuracy", percent),
        "Training loss": ("train_loss", number),
    }
    rows = []
    for name, scores in found.items():
        cells = {title: (scores.get(key), unit) for title, (key, unit) in columns.items()}
        rows.append({"Model": name, **{t: "" if value is None else unit(value) for t, (value, unit) in cells.items()}})
    return table_of(rows, title=run.name)


def phase_table(groups: Sequence[Group]) -> Table:
    """Return seconds by phase: a row per phase that took any time, a column per group."""
    used = [p for p in TRAINING_PHASES if any(run.seconds[p] > 0 for group in groups for run in group.runs)]
    rows = [(p, *(shown(group.spread(lambda r, p=p: r.seconds[p]), seconds) for group in groups)) for p in used]  # type: ignore[misc]
    total = ("all", *(shown(group.spread(lambda r: r.train_seconds), seconds) for group in groups))
    columns = ("Phase", *(group_label(group) for group in groups))
    return Table(columns=columns, rows=(*rows, total), prose=frozenset(("Phase",)))


def vote_table(run: Run) -> Table:
    """Return one row per vote: proposals, weights, support and result."""
    shadows = sorted({name for line in run.decisions for name in line.get("shadow", {})})
    rows = [
        {"Vote": str(position), **vote_row(line), **{f"Shadow {name}": shadow_cell(line, name) for name in shadows}}
        for position, line in enumerate(run.decisions, 1)
    ]
    moves = sum(line["cut_after"] != line["cut_before"] for line in run.decisions)
    title = f"{run.name}: {plural(len(rows), 'vote')}, {plural(moves, 'change')} of the cut"
    return table_of(rows, title=title, prose=("Support", "Why"))


def vote_row(line: Mapping[str, Any]) -> dict[str, str]:
    """Return a vote's row, without the shadow criteria."""
    before, after, tally = line["cut_before"], line["cut_after"], line["tally"]
    # The share of the weight behind each cut that is deeper than the one before the vote.
    shares = [f"cut {k}: {percent(tally[k] / line['total'])}" for k in range(before + 1, len(tally)) if tally[k] > 0]
    return {
        "Epoch": str(line["epoch"]),
        "Step": str(line["step"]),
        "Proposals": ballots([str(proposal) for proposal in line["proposals"]]),
        "Weights": ballots([f"{weight:.3g}" for weight in line["weights"]]),
        "Support": ", ".join(shares) or "none for a deeper cut",
        "Quorum": percent(line["quorum"]),
        "Cut": f"{before} → {after}" if before != after else f"stays {before}",
        "Why": str(line["reason"]),
    }


def ballots(values: Sequence[str]) -> str:
    """Return one value per rank in rank order; for many ranks, the number of each value."""
    if len(values) <= MOST_NAMED:
        return ", ".join(values)
    return ", ".join(f"{plural(count, 'time')} {value}" for value, count in Counter(values).most_common())


def shadow_cell(line: Mapping[str, Any], name: str) -> str:
    """Return the cut that a shadow criterion would have chosen, and the proposals behind it."""
    scored = line.get("shadow", {}).get(name)
    return f"{scored['cut']} ({ballots([str(p) for p in scored['proposals']])})" if scored else ""


def command_table(groups: Sequence[Group]) -> Table:
    """Return the flags that differ from the defaults for each group."""
    rows = [
        {"Run": group_label(group), "Command": command(group.runs[0], num_runs=len(group.runs))} for group in groups
    ]
    return table_of(rows, prose=("Run", "Command"))


def command(run: Run, *, num_runs: int = 1) -> str:
    """Return the command that starts such a run."""
    try:
        given = given_in(run.config, run.settings, source=run.name)
    except UsageError:
        # The run is of another version.
        plain = settings_of(Config())
        given = frozenset(leaf for leaf, value in run.settings.items() if value != plain.get(leaf))
    shown = {leaf: value for leaf, value in run.settings.items() if leaf in given - set(WITHOUT_EFFECT)}
    shown |= {leaf: "..." for leaf in ("seed", "data_seed") if leaf in shown and num_runs > 1}
    return (f"horovodrun -np {run.size} " if run.size > 1 else "") + shlex.join(["hvfreeze", *words_of(shown)])


def environment_table(groups: Sequence[Group]) -> Table:
    """Return the environment of the runs: a row per fact, a column per environment that differs."""
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    for run in (run for group in groups for run in group.runs):
        facts = environment_facts(run)
        found.setdefault(repr(facts), (facts, []))[1].append(run.name)
    everywhere = list(found.values())
    names = list(dict.fromkeys(name for facts, _ in everywhere for name in facts))
    titles = ("all runs",) if len(everywhere) == 1 else tuple(", ".join(runs) for _, runs in everywhere)
    rows = tuple((name, *(facts.get(name, "") for facts, _ in everywhere)) for name in names)
    return Table(columns=("Environment", *titles), rows=rows, prose=frozenset(titles))


def environment_facts(run: Run) -> dict[str, str]:
    """Return the facts of environment.json as text, one per library version."""
    facts: dict[str, str] = {}
    for key, value in run.environment.items():
        if key == "versions":
            facts.update({name: version or "not installed" for name, version in value.items()})
        elif key == "hosts":
            facts["hosts"] = ", ".join(f"{host} ({plural(n, 'rank')})" for host, n in Counter(value).items())
        elif key == "resumed":
            facts["resumed with changes"] = "; ".join(what for time in value for what in time["changed"])
        else:
            facts["ranks" if key == "size" else key] = str(value)
    return facts
