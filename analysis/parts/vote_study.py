"""The study of voting rules: what is kept of it, which rules differ from the default, and what it says."""

from __future__ import annotations

import gzip
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from analysis.parts.vote_log import SKEWS, Log, trained
from analysis.parts.vote_rules import (
    QUORUMS,
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
)
from analysis.sweeps.kept import publish, texts_of
from analysis.sweeps.statistics import Interval
from hvfreeze.report.tables import percent, to_csv

EVIDENCE, RULES, TRAINED = "evidence.jsonl.gz", "rules.csv", "trained.csv"
LOOSE = 0.3
"""A `--min-gain` that freezes something here, beside the program's default."""
GROUPS = (("gradient-norm", 0.02), ("coherence", 0.02), ("coherence", LOOSE))
"""Criterion and `--min-gain`."""
MEASURES = ("early", "late", "forgone", "saved")
MADE = ("commit", "processor")
EVERY = "all"
"""In place of one skew."""
DIVERGES = 0.05
"""Part of the votes by which a rule must at least differ from the default, early or late, for it to be trained with."""
LOGGED, TRAINED_SEEDS = tuple(range(10)), tuple(range(5))
TRAINED_SKEWS = ("dirichlet0.1", "labels")

Row = dict[str, Any]


def read_logs(path: Path) -> list[Log]:
    """Return the logged runs of a file, none where it is absent."""
    if not path.exists():
        return []
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


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
    there = {(log["skew"], log["seed"]) for log in logs}
    for seed in seeds:
        for skew in SKEWS:
            if (skew, seed) not in there:
                logs.append(trained(skew, seed))
                write_logs(path, logs)
                print(f"{skew}, seed {seed}: {percent(logs[-1]['accuracy'])}", flush=True)


def called(criterion: str, min_gain: float) -> str:
    """Return what a page calls a criterion with its setting."""
    return f"coherence, --min-gain {min_gain:g}" if criterion == "coherence" else criterion


def replay(logs: Sequence[Log]) -> list[Row]:
    """Return a row for every criterion, rule and skew, and for all skews together."""
    rows: list[Row] = []
    right = {key(log): hindsight(log) for log in logs}
    for criterion, min_gain in GROUPS:
        usual = default(criterion, min_gain)
        cuts = {rule: {key(log): replayed(rule, log) for log in logs} for rule in rules(criterion, min_gain=min_gain)}
        fared = {
            rule: {key(log): judged(own[key(log)], log, right[key(log)]) for log in logs} for rule, own in cuts.items()
        }
        for rule, own in fared.items():
            for skew in (*SKEWS, EVERY):
                row: Row = {"criterion": criterion, "min_gain": min_gain, "rule": rule.name, "skew": skew}
                chosen = [log for log in logs if skew in (log["skew"], EVERY)]
                row["runs"], row["seeds"] = len(chosen), len({log["seed"] for log in chosen})
                row["frozen_runs"] = sum(cuts[rule][key(log)][-1] > 0 for log in chosen)
                row["other_votes"] = of_votes(cuts[rule], cuts[usual], chosen)
                for measure in MEASURES:
                    values = {key(log): part(own[key(log)], measure) for log in chosen}
                    usually = {key(log): part(fared[usual][key(log)], measure) for log in chosen}
                    changes = {name: value - usually[name] for name, value in values.items()}
                    row |= columns(measure, bootstrap(by_seed(values)))
                    row |= columns(f"{measure}_change", bootstrap(by_seed(changes)))
                uniform = [fared[Rule(criterion, "uniform", quorum, min_gain)] for quorum in QUORUMS]
                row |= columns("excess", bootstrap(excess(own, uniform, chosen)))
                row |= {name: "; ".join(sorted({str(dict(log)[name]) for log in chosen})) for name in MADE}
                rows.append(row)
    return rows


def excess(
    own: Mapping[tuple[str, int], Judged], uniform: Sequence[Mapping[tuple[str, int], Judged]], logs: Sequence[Log]
) -> list[float]:
    """Return for each seed the gain that a rule forgoes beyond what uniform weights do that save as much work.

    Uniform weights at the quorums that were tried, and freezing nothing, are points of saved work and gain forgone,
    each a mean over skews; between them it is linear.
    """

    def means(fared: Mapping[tuple[str, int], Judged], measure: str) -> list[float]:
        return by_seed({key(log): part(fared[key(log)], measure) for log in logs})

    mine = zip(means(own, "saved"), means(own, "forgone"), strict=True)
    saved, forgone = ([means(fared, measure) for fared in uniform] for measure in ("saved", "forgone"))
    found = []
    for place, (work, gain) in enumerate(mine):
        points = sorted([(0.0, 0.0), *((x[place], y[place]) for x, y in zip(saved, forgone, strict=True))])
        works, gains = ([point[axis] for point in points] for axis in (0, 1))
        found.append(gain - float(np.interp(work, works, gains)))
    return found


def key(log: Log) -> tuple[str, int]:
    """Return what names a log."""
    return log["skew"], log["seed"]


def part(fared: Judged, measure: str) -> float:
    """Return one of the numbers by which a rule is judged."""
    return float(asdict(fared)[measure])


def of_votes(
    cuts: Mapping[tuple[str, int], Sequence[int]],
    others: Mapping[tuple[str, int], Sequence[int]],
    logs: Sequence[Log],
) -> float:
    """Return the part of all votes after which two rules have different cuts."""
    differ = [a != b for log in logs for a, b in zip(cuts[key(log)], others[key(log)], strict=True)]
    return round(statistics.fmean(differ), 4)


def columns(name: str, interval: Interval) -> Row:
    """Return an interval as three columns."""
    return {name: rounded(interval.mean), f"{name}_low": rounded(interval.low), f"{name}_high": rounded(interval.high)}


def rounded(value: float) -> float:
    """Return a part with four digits behind the point."""
    return round(value, 4) + 0.0


def interval_of(row: Mapping[str, str], name: str) -> Interval:
    """Return an interval over seeds from three columns."""
    return Interval(float(row[name]), float(row[f"{name}_low"]), float(row[f"{name}_high"]), int(row["seeds"]))


def rows_of(path: Path, criterion: str, min_gain: float, skew: str = EVERY) -> list[dict[str, str]]:
    """Return a file's rows of one criterion and skew."""
    wanted = {"criterion": criterion, "min_gain": f"{min_gain:g}", "skew": skew}
    return [row for row in texts_of(path) if all(str(row[name]) == value for name, value in wanted.items())]


def diverge(row: Mapping[str, str]) -> bool:
    """Tell whether a rule is too early or too late in more votes than the default, or in fewer."""
    changes = [interval_of(row, f"{measure}_change") for measure in ("early", "late")]
    return any(abs(change.mean) >= DIVERGES and change.low * change.high > 0 for change in changes)


def diverging(path: Path) -> list[Rule]:
    """Return the rules that differ from their criterion's default, in weights or quorum alone; that default first."""
    found = []
    for criterion, min_gain in GROUPS:
        usual = default(criterion, min_gain)
        differ = {row["rule"] for row in rows_of(path, criterion, min_gain) if diverge(row)}
        near = [
            rule
            for rule in rules(criterion, min_gain=min_gain)
            if rule.name in differ and (usual.quorum == rule.quorum or usual.way == rule.way)
        ]
        found += [usual, *near] if near else []
    return found


def train_missing(folder: Path, *, seeds: Iterable[int] = TRAINED_SEEDS) -> None:
    """Train with every rule that differs from the default, where that is not done, and keep each when it is done."""
    rows = texts_of(folder / TRAINED)
    there = {(row["criterion"], row["min_gain"], row["rule"], row["skew"], row["seed"]) for row in rows}
    known = {key(log): log for log in read_logs(folder / EVIDENCE)}
    for seed in seeds:
        for skew in TRAINED_SKEWS:
            made = [known[skew, seed]]
            for rule in diverging(folder / RULES):
                named = (rule.criterion, f"{rule.min_gain:g}", rule.name, skew, str(seed))
                if named in there:
                    continue
                log = alike(rule, made)
                if log is None:
                    log = trained(skew, seed, Voting(rule, made[0]["samples"], made[0]["coverage"]).decide)
                    made.append(log)
                row = dict(zip(("criterion", "min_gain", "rule", "skew", "seed"), named, strict=True))
                row |= {"accuracy": str(log["accuracy"]), "full": str(made[0]["accuracy"])}
                rows.append(row | {"cuts": "-".join(map(str, log["cuts"])), "commit": log["commit"]})
                publish(folder / TRAINED, to_csv(rows))
                print(", ".join(rows[-1].values()), flush=True)


def alike(rule: Rule, made: Sequence[Log]) -> Log | None:
    """Return the run that a rule would repeat: on its evidence the rule decides, vote by vote, as was decided."""
    return next((log for log in made if replayed(rule, log) == log["cuts"]), None)


def accuracies(rows: Sequence[Mapping[str, str]], column: str = "accuracy") -> dict[int, float]:
    """Return for each seed the mean accuracy over skews."""
    seeds = sorted({int(row["seed"]) for row in rows})
    return {seed: statistics.fmean(float(row[column]) for row in rows if int(row["seed"]) == seed) for seed in seeds}


def trained_rows(path: Path, criterion: str, min_gain: float, rule: str, skew: str = EVERY) -> list[dict[str, str]]:
    """Return the trained runs of a rule."""
    wanted = {"criterion": criterion, "min_gain": f"{min_gain:g}", "rule": rule}
    found = [row for row in texts_of(path) if all(row[name] == value for name, value in wanted.items())]
    return [row for row in found if skew in (row["skew"], EVERY)]
