"""How long does an exchange of ResNet-18's gradients take, with Open MPI's own settings and with ours?

    python -m analysis.exchange [--out DIR]

On the local cluster of launch/, 1 Gbit/s a node, settings in turn; DIR gets rows.csv and README.md. Ours are those that
`hvfreeze.ranks.machine.mpi_environment.tune_open_mpi` makes where nothing is set beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from analysis.benchmarks.launching import environment
from analysis.communication import milliseconds
from analysis.sweeps.estimates import bits_per_second
from analysis.sweeps.experiment import RESULTS
from analysis.sweeps.launching import ROOT, nodes_up
from analysis.sweeps.presets import REDUCED
from analysis.sweeps.provenance import commit
from analysis.sweeps.rows import publish
from analysis.sweeps.statistics import mean_interval, paired_ratio, shown
from hvfreeze.chain.models import build_model
from hvfreeze.ranks.horovod_world import open_world
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.report.csv_files import to_csv
from hvfreeze.report.units import factor
from hvfreeze.runs.environment import facts_of_this_rank

NODES, BANDWIDTH = (2, 3, 4), "1gbit"
REPEATS, EXCHANGES = 5, 6
THEIRS = {
    "OMPI_MCA_btl_tcp_eager_limit": "65536",
    "OMPI_MCA_btl_tcp_max_send_size": "131072",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "0",
}
"""Open MPI 4.1.4's own values."""
SETTINGS: dict[str, dict[str, str]] = {"Open MPI's": THEIRS, "ours": {}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or with --worker be one rank of it; return 0."""
    parser = argparse.ArgumentParser(prog="python -m analysis.exchange", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "exchange", help="folder for rows.csv and README.md")
    parser.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        work(options.worker)
        return 0
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for nodes in NODES:
        rows += measure(nodes)
        lines.append(verdict(rows, nodes))
        print(lines[-1], flush=True)
        publish(options.out / "rows.csv", to_csv(rows))
        publish(options.out / "README.md", readme(lines))
    return 0


def measure(nodes: int) -> list[dict[str, Any]]:
    """Return a row per job: the median seconds of its exchanges."""
    rows = []
    cluster = REDUCED.run("exchange", 0, ranks=nodes, nodes=nodes, bandwidth=BANDWIDTH)
    with nodes_up(cluster) as (name, _), tempfile.TemporaryDirectory() as folder:
        for repeat in range(REPEATS):
            for setting, variables in SETTINGS.items():
                found = Path(folder) / f"{repeat}-{setting}.json"
                job = [str(ROOT / "launch/horovodrun.sh"), "-np", str(nodes), "env"]
                job += [f"{key}={value}" for key, value in variables.items()]
                job += [sys.executable, "-m", "analysis.exchange", "--worker", str(found)]
                command = [str(ROOT / "launch/cluster"), "run", "--name", name, "--", *job]
                subprocess.run(command, cwd=ROOT, env=environment(os.environ), check=True, stdout=subprocess.DEVNULL)
                told = json.loads(found.read_text(encoding="utf-8"))
                row = {"nodes": nodes, "bandwidth": BANDWIDTH, "settings": setting, "repeat": repeat}
                rows.append({**row, "payload_bytes": told["bytes"], "seconds": statistics.median(told["seconds"])})
    return rows


def verdict(rows: Sequence[dict[str, Any]], nodes: int) -> str:
    """Return what the rows say of a number of nodes."""
    taken = {
        name: {row["repeat"]: row["seconds"] for row in rows if (row["nodes"], row["settings"]) == (nodes, name)}
        for name in SETTINGS
    }
    payload = next(row["payload_bytes"] for row in rows if row["nodes"] == nodes)
    line_rate = 8 * 2 * (nodes - 1) / nodes * payload / bits_per_second(BANDWIDTH)
    spans = ", ".join(
        f"{name} {shown(mean_interval(list(values.values())), milliseconds)}" for name, values in taken.items()
    )
    gain = paired_ratio(taken["Open MPI's"], taken["ours"])
    return (
        f"{nodes} nodes at {BANDWIDTH}/s, {payload / 1e6:.1f} MB: {spans}; a ring at line rate "
        f"{milliseconds(line_rate)}; ours is {shown(gain, factor, count=True)} as fast"
    )


def readme(verdicts: Sequence[str]) -> str:
    """Return README.md."""
    known = facts_of_this_rank()
    versions = ", ".join(f"{name} {known['versions'][name]}" for name in ("torch", "horovod"))
    told = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    launcher = told.splitlines()[0]
    claims = "\n".join(f"- {verdict}" for verdict in verdicts)
    return (
        f"# One exchange of ResNet-18's gradients, with Open MPI's settings and with ours\n\n{claims}\n\n"
        "## Limits\n\n"
        "- Links are limited by the kernel, without a switch's latency; ranks beyond two share two cores.\n"
        "- Nothing is computed meanwhile, so no part of the exchange is hidden.\n\n"
        "## How it was made\n\n"
        f"- `python -m analysis.exchange`: {REPEATS} jobs with each of the settings in turn, each the median of "
        f"{EXCHANGES - 1} exchanges; brackets hold 95 % intervals over jobs (Student's t, ratios paired)\n"
        f"- {known['processor']}, {known['cores']} cores; {launcher}, {versions}; source {commit()}\n"
        "- numbers: [rows.csv](rows.csv)\n"
    )


def work(out: Path) -> None:
    """Exchange gradients of the size of ResNet-18's, a step's at a time. Collective."""
    world = open_world()
    parameters = list(build_model("resnet18", num_classes=10, weights="none", image_size=32).model.named_parameters())
    reducer, seconds = Reducer(world), []
    reducer.carry(parameters)
    for place in range(EXCHANGES):
        world.barrier(name=f"exchange.{place}")
        start = time.perf_counter()
        reducer.begin()
        whole(parameters).backward()
        reducer.finish()
        seconds.append(time.perf_counter() - start)
    if world.rank == 0:
        told = {"bytes": reducer.payload_bytes // EXCHANGES, "seconds": seconds[1:]}
        out.write_text(json.dumps(told), encoding="utf-8")
    world.close()


def whole(parameters: Sequence[tuple[str, nn.Parameter]]) -> Any:
    """Return a loss that costs next to nothing and gives every parameter a gradient."""
    return sum(parameter.sum() for _, parameter in parameters)


if __name__ == "__main__":
    sys.exit(main())
