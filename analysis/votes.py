"""Do weighted votes of the ranks decide better than one signal, when their data differ? (Left open by the study.)

    python -m analysis.votes --log --replay --train

What every rank observes in runs in which nothing freezes; all rules of voting replayed on it; runs with the rules that
then differ from the default. Each may be asked for alone, no data are needed, and finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from analysis.parts import vote_log, vote_replay
from analysis.parts.vote_log import RANKS, SKEWS, Log, trained
from analysis.parts.vote_replay import (
    QUORUMS,
    WEIGHTINGS,
    Judged,
    Rule,
    Voting,
    bootstrap,
    by_seed,
    default,
    hindsight,
    judged,
    replayed,
    rules,
    voted,
)
from analysis.sweeps.charts import FIGURE_WIDTH, OTHERS
from analysis.sweeps.kept import RESULTS, publish
from analysis.sweeps.pages import Page
from analysis.sweeps.statistics import NOTHING, Interval, paired_difference, shown, signed_points
from hvfreeze.report.figures import STYLE
from hvfreeze.report.tables import Table, percent, to_csv

NAME = "votes"
EVIDENCE, RULES, TRAINED = "evidence.jsonl.gz", "rules.csv", "trained.csv"
LOOSE = 0.3
"""A `--min-gain` that freezes blocks here, in addition to the program's default."""
GROUPS = (("gradient-norm", 0.02), ("coherence", 0.02), ("coherence", LOOSE))
"""Criterion and `--min-gain`."""
MEASURES = ("early", "late", "forgone", "saved")
EVERY = "all"
"""Label for all kinds of skew."""
DIVERGES = 0.05
"""Part of the votes by which a rule must at least differ from the default, early or late, for it to be trained with."""
LOGGED, TRAINED_SEEDS = range(10), range(5)
TRAINED_SKEWS = ("dirichlet0.1", "labels")
COLUMNS = ("Rule", "Too early", "Too late", "Work saved", "Gain forgone", "Beyond uniform", "Accuracy")


def read_logs(path: Path) -> list[Log]:
    """Return the logged runs of a file, none where it is absent."""
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] if path.exists() else []


def write_logs(path: Path, logs: Sequence[Log]) -> None:
    """Replace a file at once; the same bytes for the same runs."""
    lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(gzip.compress(lines.encode(), mtime=0))
    os.replace(part, path)


def add_missing(path: Path, *, seeds: Iterable[int] = LOGGED) -> None:
    """Train what no log is there of, and keep each when it is done."""
    logs = read_logs(path)
    there = {key(log) for log in logs}
    for seed in seeds:
        for skew in SKEWS:
            if (skew, seed) not in there:
                logs.append(trained(skew, seed))
                write_logs(path, logs)
                print(f"{skew}, seed {seed}: {percent(logs[-1]['accuracy'])}", flush=True)


def key(log: Log) -> tuple[str, int]:
    """Return what names a log."""
    return log["skew"], log["seed"]


def called(criterion: str, min_gain: float) -> str:
    """Return what a page calls a criterion with its setting."""
    return f"coherence, --min-gain {min_gain:g}" if criterion == "coherence" else criterion


def replay(logs: Sequence[Log]) -> list[dict[str, Any]]:
    """Return a row for every criterion, rule and skew, and for all skews together."""
    rows: list[dict[str, Any]] = []
    right = {key(log): hindsight(log) for log in logs}
    for criterion, min_gain in GROUPS:
        usual = default(criterion, min_gain)
        cuts = {rule: {key(log): replayed(rule, log) for log in logs} for rule in rules(criterion, min_gain=min_gain)}
        fared = {
            rule: {key(log): judged(own[key(log)], log, right[key(log)]) for log in logs} for rule, own in cuts.items()
        }
        uniform = [fared[Rule(criterion, "uniform", quorum, min_gain)] for quorum in QUORUMS]
        for rule, own in fared.items():
            for skew in (*SKEWS, EVERY):
                chosen = [log for log in logs if skew in (log["skew"], EVERY)]
                differ = [
                    a != b
                    for log in chosen
                    for a, b in zip(*(voted(cuts[each][key(log)], log) for each in (rule, usual)), strict=True)
                ]
                row: dict[str, Any] = {"criterion": criterion, "min_gain": min_gain, "rule": rule.name, "skew": skew}
                row |= {"runs": len(chosen), "seeds": len({log["seed"] for log in chosen})}
                row["frozen_runs"] = sum(cuts[rule][key(log)][-1] > 0 for log in chosen)
                row["other_votes"] = round(statistics.fmean(differ), 4)
                for measure in MEASURES:
                    ours, theirs = (
                        {key(log): float(asdict(each[key(log)])[measure]) for log in chosen}
                        for each in (own, fared[usual])
                    )
                    row |= columns(measure, bootstrap(by_seed(ours)))
                    changes = {name: value - theirs[name] for name, value in ours.items()}
                    row |= columns(f"{measure}_change", bootstrap(by_seed(changes)))
                row |= columns("excess", bootstrap(excess(own, uniform, chosen)))
                row |= {
                    name: "; ".join(sorted({str(dict(log)[name]) for log in chosen}))
                    for name in ("commit", "processor")
                }
                rows.append(row)
    return rows


def excess(
    own: Mapping[tuple[str, int], Judged], uniform: Sequence[Mapping[tuple[str, int], Judged]], logs: Sequence[Log]
) -> list[float]:
    """Return for each seed the gain that a rule forgoes beyond what uniform weights do that save as much work.

    Uniform weights at the quorums that were tried, and freezing nothing, are points of saved work and gain forgone,
    each a mean over skews; between them it is linear.
    """

    def means(fared: Mapping[tuple[str, int], Judged]) -> list[tuple[float, float]]:
        both = [{key(log): getattr(fared[key(log)], name) for log in logs} for name in ("saved", "forgone")]
        return list(zip(*map(by_seed, both), strict=True))

    points = [means(fared) for fared in uniform]
    found = []
    for place, (work, gain) in enumerate(means(own)):
        works, gains = zip(*sorted([(0.0, 0.0), *(each[place] for each in points)]))
        found.append(gain - float(np.interp(work, works, gains)))
    return found


def columns(name: str, interval: Interval) -> dict[str, float]:
    """Return an interval as three columns."""
    ends = {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return {column: round(value, 4) + 0.0 for column, value in ends.items()}


class Study:
    """The recorded results of the replay and of trained runs."""

    def __init__(self, folder: Path) -> None:
        self.rules, self.runs = (
            pd.read_csv(folder / name) if (folder / name).exists() else pd.DataFrame() for name in (RULES, TRAINED)
        )

    def rows(self, criterion: str, min_gain: float, skew: str = EVERY) -> pd.DataFrame:
        """Return the rules with one criterion, by name; that of the program first."""
        mine = self.rules.query("criterion == @criterion and min_gain == @min_gain and skew == @skew")
        return mine.set_index("rule", drop=False)

    def spread(self, row: Any, name: str) -> Interval:
        """Return an interval over seeds."""
        return Interval(row[name], row[f"{name}_low"], row[f"{name}_high"], int(row["seeds"]))

    def accuracies(self, criterion: str, min_gain: float, rule: str, column: str = "accuracy") -> dict[int, float]:
        """Return the mean accuracy over skews of the runs that were trained by a rule, by seed."""
        if self.runs.empty:
            return {}
        mine = self.runs.query("criterion == @criterion and min_gain == @min_gain and rule == @rule")
        return dict(mine.groupby("seed")[column].mean())

    def gained(self, criterion: str, min_gain: float, rule: str) -> Interval:
        """Return the accuracy by a rule minus that by the default, paired by seed."""
        first = default(criterion, min_gain).name
        if rule == first:
            return NOTHING
        return paired_difference(*(self.accuracies(criterion, min_gain, name) for name in (rule, first)))

    def against_full(self, criterion: str, min_gain: float) -> Interval:
        """Return the accuracy by the default rule minus that of runs in which nothing froze."""
        first = default(criterion, min_gain).name
        both = (self.accuracies(criterion, min_gain, first, column) for column in ("accuracy", "full"))
        return paired_difference(*both)

    def diverging(self) -> list[Rule]:
        """Return the rules that differ from a criterion's default in weights or quorum alone; that default first."""
        found = []
        for criterion, min_gain in GROUPS:
            usual, rows = default(criterion, min_gain), self.rows(criterion, min_gain)
            near = [
                rule
                for rule in rules(criterion, min_gain=min_gain)
                if (usual.quorum == rule.quorum or usual.way == rule.way) and self.differs(rows.loc[rule.name])
            ]
            found += [usual, *near] if near else []
        return found

    def differs(self, row: Any) -> bool:
        """Return True if the share of votes that are too early or too late differs from the default's."""
        changes = [self.spread(row, f"{measure}_change") for measure in ("early", "late")]
        return any(abs(change.mean) >= DIVERGES and change.low * change.high > 0 for change in changes)

    def table(self, criterion: str, min_gain: float) -> Table:
        """Return how each rule with a criterion fared."""
        cells = []
        for name, row in self.rows(criterion, min_gain).iterrows():
            change = self.gained(criterion, min_gain, name)
            beyond = "" if name.startswith("uniform") else shown(self.spread(row, "excess"), signed_points)
            parts = (shown(self.spread(row, measure), percent) for measure in ("early", "late", "saved", "forgone"))
            cells.append((name, *parts, beyond, shown(change, signed_points) if change.n else ""))
        return Table(columns=COLUMNS, rows=tuple(cells))

    def words(self) -> dict[str, Any]:
        """Return what the page names."""
        usual = self.rows(*GROUPS[0])

        def fared(criterion: str, min_gain: float, rule: str, measure: str) -> str:
            return shown(self.spread(self.rows(criterion, min_gain).loc[rule], measure), percent)

        def changed(criterion: str, min_gain: float, rule: str, measure: str) -> str:
            return shown(self.spread(self.rows(criterion, min_gain).loc[rule], f"{measure}_change"), signed_points)

        return {
            "rows": self.rows,
            "usual": usual.iloc[0],
            "runs": self.runs,
            "called": called,
            "fared": fared,
            "changed": changed,
            "trained": lambda *rule: self.gained(*rule).n > 0,
            "gained": lambda *rule, n=False: shown(self.gained(*rule), signed_points, count=n),
            "against_full": self.against_full,
            "diverging": lambda *group: [
                rule.name
                for rule in self.diverging()
                if (rule.criterion, rule.min_gain) == group and rule != default(*group)
            ],
            "quorums": lambda measure: ", ".join(
                percent(usual.loc[f"uniform, {quorum:g}"][measure]) for quorum in QUORUMS
            ),
            "least_beyond": signed_points(usual["excess"].min()),
            "most_beyond": signed_points(usual["excess"].max()),
            "table": self.table,
            "log": vote_log,
            "judging": vote_replay,
            "here": sys.modules[__name__],
        }


def words(root: Path) -> dict[str, Any]:
    """Return what the page names."""
    return Study(root / NAME).words()


PAGE = Page(NAME, words, lambda root: {"replay": trade(Study(root / NAME))})


def train_missing(folder: Path, *, seeds: Iterable[int] = TRAINED_SEEDS) -> None:
    """Train with every rule that differs from the default, where that is not done, and keep each when it is done."""
    study, known = Study(folder), {key(log): log for log in read_logs(folder / EVIDENCE)}
    rows = study.runs.to_dict("records")
    there = {(row["criterion"], row["min_gain"], row["rule"], row["skew"], row["seed"]) for row in rows}
    for seed in seeds:
        for skew in TRAINED_SKEWS:
            made = [known[skew, seed]]
            for rule in study.diverging():
                named = (rule.criterion, rule.min_gain, rule.name, skew, seed)
                if named in there:
                    continue
                # The rule repeats the run: on its evidence it makes the same decision in every interval.
                log = next((log for log in made if replayed(rule, log) == log["cuts"]), None)
                if log is None:
                    log = trained(skew, seed, Voting(rule, made[0]).decide)
                    made.append(log)
                row = dict(zip(("criterion", "min_gain", "rule", "skew", "seed"), named, strict=True))
                row |= {"accuracy": log["accuracy"], "full": made[0]["accuracy"]}
                rows.append(row | {"cuts": "-".join(map(str, log["cuts"])), "commit": log["commit"]})
                publish(folder / TRAINED, to_csv(rows))
                print(", ".join(map(str, rows[-1].values())), flush=True)


def trade(study: Study) -> Figure:
    """Return what rules save against what they forgo, a panel for each criterion that froze anything."""
    groups = [(group, study.rows(*group)) for group in GROUPS]
    groups = [(group, rows) for group, rows in groups if rows["frozen_runs"].sum() > RANKS]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(FIGURE_WIDTH, 0.85 * FIGURE_WIDTH), layout="constrained")
        for axes, (group, rows) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups):
            for way in WEIGHTINGS:
                own = rows[rows["rule"].str.startswith(f"{way},")].sort_values("saved")
                colour, label = (OTHERS[1], way) if way == "uniform" else (OTHERS[0], "other weights")
                axes.plot(100 * own["saved"], 100 * own["forgone"], color=colour, marker="o", markersize=4, label=label)
            alone = rows[~rows["rule"].str.contains(",")]
            for (name, row), marker, colour in zip(alone.iterrows(), "x*", OTHERS[2:]):
                axes.plot(100 * row["saved"], 100 * row["forgone"], marker, color=colour, markersize=8, label=name)
            axes.set(title=called(*group), xlabel="work saved (%)", xlim=(0, None), ylim=(0, None))
        figure.axes[0].set_ylabel("gain forgone (%)")
        named = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels())))
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3)
        return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Log, replay and train with rules, as asked for; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.votes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("log", "replay", "train"):
        parser.add_argument(f"--{name}", action="store_true")
    options, folder = parser.parse_args(arguments), RESULTS / NAME
    torch.set_num_threads(1)
    if options.log:
        add_missing(folder / EVIDENCE)
    if options.replay:
        publish(folder / RULES, to_csv(replay(read_logs(folder / EVIDENCE))))
    if options.train:
        train_missing(folder)
    PAGE.write(RESULTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
