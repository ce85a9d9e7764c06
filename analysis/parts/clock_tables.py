"""What the measurements of `analysis.clock` came to, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from analysis.sweeps.kept import machines_of
from analysis.sweeps.statistics import Interval, mean_interval, shown
from hvfreeze.report.tables import factor, seconds

UNSTAMPED = "AMD EPYC, 4 cores, one thread a rank; torch 2.13.0+cpu, horovod 0.28.1"
"""Machine and versions of kept rows that name none."""
PIXELS = {"peers": 32, "peers64": 64}
WAYS = {"auto": "`--freeze auto --epochs 1`", "auto-one-view": "the same, `--mirror off`", "full": "full fine-tuning"}


def found(rows: Sequence[dict[str, str]], **wanted: str) -> list[dict[str, str]]:
    """Return the rows that have these values."""
    return [row for row in rows if wanted.items() <= row.items()]


def times(rows: Sequence[dict[str, str]], what: str) -> Interval:
    """Return the seconds of repeated commands, `whole` or `train`; epochs that were not made take as long as others."""
    taken = []
    for row in rows:
        made, missing = float(row["train_seconds"]), int(row["epochs"]) - int(row["epochs_made"])
        taken.append(float(row[f"{what}_seconds"]) + made * missing / int(row["epochs_made"]))
    return mean_interval(taken)


def grounds(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return experiments and numbers of samples, in the order of the rows."""
    return [
        dict(pair)
        for pair in dict.fromkeys(tuple((key, row[key]) for key in ("experiment", "samples")) for row in rows)
    ]


def verdicts(rows: Sequence[dict[str, str]]) -> str:
    """Return for every ground what the whole command takes on two ranks, and how many times faster that is."""
    heads = ("images", "full fine-tuning", WAYS["auto"], "as fast", "and `--mirror off`", "as fast", "evaluating")
    lines = [f"| {' | '.join(heads)} |", "|:---|" + "---:|" * (len(heads) - 1)]
    for ground in grounds(rows):
        mine = {way: found(rows, **ground, way=way, ranks="2") for way in WAYS}
        if not all(mine.values()):
            continue
        whole, train = ({way: times(mine[way], what) for way in WAYS} for what in ("whole", "train"))
        cells = [f"{ground['samples']} at {PIXELS[ground['experiment']]} pixels"]
        cells.append(f"{shown(whole['full'], seconds)}, {mine['full'][0]['epochs']} epochs")
        for way in ("auto", "auto-one-view"):
            alone = factor(train["full"].mean / train[way].mean)
            cells += [shown(whole[way], seconds), f"{factor(whole['full'].mean / whole[way].mean)} ({alone})"]
        evaluating = [float(row["evaluate_seconds"]) for way in WAYS for row in mine[way]]
        lines.append(f"| {' | '.join([*cells, seconds(mean_interval(evaluating).mean)])} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def factor_of_commands(rows: Sequence[dict[str, str]], **ground: str) -> str:
    """Return how many times faster the whole command with `--freeze auto` is on two ranks, empty if not measured."""
    whole = [times(found(rows, **ground, way=way, ranks="2"), "whole").mean for way in ("full", "auto")]
    return "" if any(map(math.isnan, whole)) else f"{factor(whole[0] / whole[1])} as fast"


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return whole commands by ground, way and ranks, with the training in them."""
    ranks = sorted({row["ranks"] for row in rows}, key=int)
    heads = [f"{count} rank{'' if count == '1' else 's'}" for count in ranks]
    lines = [
        f"| images | way | {' | '.join(heads)} |",
        "|---|---|" + "---:|" * len(ranks),
    ]
    for ground in grounds(rows):
        for way, words in WAYS.items():
            cells = []
            for count in ranks:
                mine = found(rows, **ground, way=way, ranks=count)
                whole, train = (seconds(times(mine, what).mean) if mine else "" for what in ("whole", "train"))
                cells.append(f"{whole} ({train})" if mine else "")
            pixels = PIXELS[ground["experiment"]]
            lines.append(f"| {ground['samples']} at {pixels} pixels | {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def other_machines(rows: Sequence[dict[str, str]]) -> str:
    """Return which ranks' times no others can be held against, where they are of several machines; else nothing."""
    by_machine: dict[str, set[str]] = {}
    for row in rows:
        by_machine.setdefault(row.get("machine") or UNSTAMPED, set()).add(row["ranks"])
    if len(by_machine) < 2:
        return ""
    parts = [
        f"{', '.join(sorted(ranks, key=int))} on {', '.join(name.split(', ')[:2])}"
        for name, ranks in by_machine.items()
    ]
    return f"- Times of different machines do not compare. Ranks: {'; '.join(parts)}.\n"


def readme(rows: Sequence[dict[str, str]]) -> str:
    """Return README.md."""
    sources = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines, others = verdicts(rows), any(row["epochs"] != row["epochs_made"] for row in rows)
    scaled = "- Epochs of full fine-tuning that were not made (numbers: epochs_made) are taken to last as long.\n"
    scaled = scaled if others else ""
    return (
        "# What the whole command takes, from its start until all ranks have left\n\n"
        "Importing libraries, listing and reading the images, training, evaluating 10 000 test images, writing the "
        f"model. On two ranks; as fast: in brackets where training alone counts:\n\n{lines}\n\n"
        f"Whole command, and in brackets the training in it:\n\n{table(rows)}\n\n"
        "## Limits\n\n"
        "- The batch is a rank's: twice the ranks make half the steps of an epoch. Accuracies are those of 2 ranks.\n"
        f"{scaled}{other_machines(rows)}- Ranks share one machine's memory; files had been read before.\n\n"
        "## How it was made\n\n"
        "- `python -m analysis.clock`: seed 0, the shortest full fine-tuning within half a point of the best\n"
        f"- {machines_of(rows, unstamped=UNSTAMPED)}; source {sources}\n"
        "- numbers: [rows.csv](rows.csv)\n"
    )
