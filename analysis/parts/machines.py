"""Which machines the experiments were run on."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from analysis.sweeps.kept import ENVIRONMENTS, RUNS, by_name, machine_of, read_lines

OTHERS = (
    "Of [bench](analysis/results/bench/README.md), [clock](analysis/results/clock/README.md), "
    "[exchange](analysis/results/exchange/README.md), [growth](analysis/results/growth/README.md), "
    "[network](analysis/results/network/README.md) and [torture](analysis/results/torture/README.md) the pages name "
    "the machine. The replayed votes keep the processor alone. All are virtual machines: one row may be several hosts."
)


def kept(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield machine, experiment and day of every kept run."""
    known = {name: machine_of(environment) for name, environment in by_name(root / ENVIRONMENTS).items()}
    for path in sorted(root.glob(f"*/{RUNS}")):
        for line in read_lines(path).values():
            yield known[line["environment"]], path.parent.name, str(line.get("finished") or "")[:10]


def table(root: Path) -> str:
    """Return a row for each machine: its experiments with their runs, and when; nothing without results."""
    runs: dict[str, Counter[str]] = defaultdict(Counter)
    days: dict[str, set[str]] = defaultdict(set)
    for machine, experiment, day in kept(root):
        runs[machine][experiment] += 1
        days[machine].add(day)
    for path in sorted(root.glob("step_costs/*.json")):
        costs = json.loads(path.read_text(encoding="utf-8"))
        for machine in {machine_of(costs.get("stamps", {}).get(name, costs)) for name in costs["seconds"]}:
            runs[machine][f"step_costs, {path.stem}"] += 1
    if not runs:
        return ""
    lines = ["| processor | cores | system | experiments (runs) | runs | when |", "|:---|---:|:---|:---|---:|:---|"]
    for machine in sorted(runs):
        processor, cores, system = (*machine.split(", "), "not kept")[:3]
        told = ", ".join(f"{name} ({count})" for name, count in sorted(runs[machine].items()))
        ends = sorted(filter(None, days[machine]))
        when = " to ".join(dict.fromkeys(ends[:1] + ends[-1:])) or "not kept"
        cells = (processor, cores.removesuffix(" cores"), system, told, str(sum(runs[machine].values())), when)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", OTHERS])
