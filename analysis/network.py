"""N nodes, how many times faster? Ours, Horovod with fp16 and DDP with PowerSGD on networks of 200 Mbit/s to 10 Gbit/s.

    python -m analysis.network [--out DIR] [--quick]
    python -m analysis.network --all --data-dir DIR --weights FILE    and communication and exchange after it

On the local cluster of launch/, one rank a node, all ways in turn on the same nodes; a network whose rows are in DIR is
not measured again, so the same command continues a stopped one. A step is that of ResNet-18 at 32 pixels on images
in memory, 64 a rank, on the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.benchmarks.contest import rotated
from analysis.benchmarks.launching import environment
from analysis.parts.networks import cycles
from analysis.parts.networks.sides import BATCH_ROWS, JOBS, ROUNDS, measure
from analysis.parts.networks.tables import ALONE, LATER, LIMITS, NETWORKS, NOTHING_SENT, WAYS, kept, of_network, whole
from analysis.parts.networks.turns import Turns
from analysis.sweeps.kept import RESULTS, commit, machine, publish, texts_of, told_of
from analysis.sweeps.launching import ROOT, nodes_up, on_nodes, require_cluster
from analysis.sweeps.options import folder_to_write
from analysis.sweeps.pages import Page, Words
from analysis.sweeps.presets import REDUCED
from analysis.sweeps.sweep import SMOKE_RESULTS
from analysis.sweeps.sweep import main as main_of
from hvfreeze.errors import HvfreezeError, RefusedError
from hvfreeze.report.tables import to_csv

NAME = "network"
UNSTAMPED = "AMD EPYC, 4 cores; torch 2.13.0+cpu, horovod 0.28.1"
"""Machine and versions of kept rows that name none."""
Rounds = dict[str, list[list[float]]]
"""Seconds of the steps of each way, round by round."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, or with --worker be one rank of it; return 0."""
    # Arguments of the other experiments pass through: --work is theirs, and not short for --worker.
    parser = argparse.ArgumentParser(
        prog="python -m analysis.network", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--out",
        type=folder_to_write,
        help=f"folder for rows.csv and README.md [{RESULTS / NAME}; quick: {SMOKE_RESULTS / NAME}]",
    )
    parser.add_argument("--quick", action="store_true", help="two networks, next to no steps: only to see that it runs")
    parser.add_argument("--all", action="store_true", help="also communication and exchange, with what follows")
    parser.add_argument("--worker", nargs=3, metavar=("JOB", "FILE", "FOLDER"), help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(arguments)
    if options.worker is not None:
        job, out, scratch = options.worker
        measure(job, Path(out), Path(scratch), quick=options.quick)
        return 0
    if rest and not options.all:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    out = options.out or (SMOKE_RESULTS if options.quick else RESULTS) / NAME
    try:
        measure_missing(out, quick=options.quick)
    except HvfreezeError as error:
        print(f"network: error: {error}", file=sys.stderr)
        return error.exit_code
    return others(rest) if options.all else 0


def measure_missing(out: Path, *, quick: bool) -> None:
    """Measure every network whose rows are not there, and write them up one by one.

    Raises:
        UsageError: this machine cannot have the nodes, or links that delay.
        RefusedError: a job failed; what was measured before is kept.
    """
    rows = kept(out / "rows.csv")
    missing = [network for network in (NETWORKS[:2] if quick else NETWORKS) if not whole(rows, *network)]
    looks = out / "cycles.csv"
    if missing or not (quick or cycles.complete(looks)):
        require_cluster(latency=any(", " in link for _, link in missing))
    for nodes, link in missing:
        rows = pd.concat([rows, pd.DataFrame(rows_of(nodes, link, quick))])
        publish(out / "rows.csv", to_csv(rows.to_dict("records")))
        print("\n".join(line(row) for row in of_network(rows, nodes, link).to_dict("records")))
    if not quick:
        cycles.cycles(looks)
        PAGE.write(out.parent, out)


def others(arguments: Sequence[str]) -> int:
    """Run the other experiments about networks; return the worst exit code."""
    from analysis import communication, exchange

    return max(main_of(communication.EXPERIMENT, arguments), exchange.main([]))


def rows_of(nodes: int, link: str, quick: bool) -> list[dict[str, Any]]:
    """Return a row for each way of training on a network."""
    bandwidth, _, latency = link.partition(", ")
    cluster = REDUCED.run("network", 0, ranks=nodes, nodes=nodes, bandwidth=bandwidth)
    with nodes_up(cluster, latency=latency) as (name, _), tempfile.TemporaryDirectory() as folder:
        try:
            told = told_in_turn(name, nodes, Path(folder), quick=quick)
        except RefusedError as error:
            raise RefusedError(f"{nodes} nodes at {link or 'no limit'}: {error}; run it again to continue") from error
    stamp = {"commit": commit(), "machine": machine("; ")}
    return [{**row_of(nodes, link, way, told["seconds"], told["told"][way]), **stamp} for way in WAYS]


def told_in_turn(cluster: str, nodes: int, folder: Path, *, quick: bool) -> dict[str, dict[str, Any]]:
    """Return the seconds of all ways, and what they tell, from jobs that take turns on a cluster's nodes."""
    launcher = on_nodes(cluster, nodes, "analysis.network")
    variables = {**environment(os.environ), "OMP_NUM_THREADS": "1"}
    jobs: list[Turns] = []
    with contextlib.ExitStack() as stack:
        for name in JOBS:
            worker = ["--worker", name, str(folder / f"{name}.json"), str(folder), *(["--quick"] if quick else [])]
            process = subprocess.Popen([*launcher, *worker], cwd=ROOT, env=variables, start_new_session=True)
            jobs.append(Turns(name, folder, nodes, process))
            stack.enter_context(jobs[-1].ended())
            # One by one: what they do to get ready would take cores from each other.
            jobs[-1].wait(0)
        for number in range(1, 1 if quick else ROUNDS):
            for job in rotated(jobs, number):
                job.advance()
                job.wait(number)
        for job in jobs:
            job.conclude()
    found = [json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in JOBS]
    return {part: {way: value for each in found for way, value in each[part].items()} for part in ("seconds", "told")}


def row_of(nodes: int, link: str, way: str, rounds: Rounds, told: dict[str, Any]) -> dict[str, Any]:
    """Return what a way's steps came to, with what was forecast for it."""
    plan = told.get("exchange", {})
    chosen = plan.get("compression", "")
    seconds = [each for steps in rounds[way] for each in steps]
    parts = [
        statistics.median(alone) / statistics.median(mine)
        for alone, mine in zip(rounds[ALONE], rounds[way], strict=True)
    ]
    return {
        "nodes": nodes,
        "bandwidth": link,
        "way": way,
        "steps": len(seconds),
        "step_seconds": statistics.median(seconds),
        "images_per_second": (1 if way == ALONE else nodes) * BATCH_ROWS / statistics.median(seconds),
        "part": statistics.median(parts),
        "lowest_part": min(parts),
        "highest_part": max(parts),
        "fastest_seconds": min(seconds),
        "compression": chosen,
        "forecast_seconds": plan["forecast"][chosen]["step"] if chosen else "",
        "measured_bits_per_second": plan.get("bits_per_second", ""),
        "latency_seconds": plan.get("latency_seconds", ""),
        "cycle_ms": told.get("cycle_ms", ""),
    }


def line(row: dict[str, Any]) -> str:
    """Return a row for a person who waits."""
    step, pace = 1e3 * float(row["step_seconds"]), float(row["images_per_second"])
    forecast = f", forecast {1e3 * float(row['forecast_seconds']):.0f} ms" if row["forecast_seconds"] else ""
    network = f"{row['nodes']} x {row['bandwidth'] or 'unlimited'}"
    return f"{network:14} {row['way']:15} {pace:6.0f} images/s, {step:6.0f} ms a step {row['compression']}{forecast}"


def words(root: Path) -> Words:
    rows, rests = kept(root / NAME / "rows.csv"), texts_of(root / NAME / "cycles.csv")
    by_way = rows.assign(part=rows["part"].astype(float)).set_index(["nodes", "bandwidth", "way"])
    parts = by_way["part"]

    def cell(nodes: int, link: str, way: str) -> str:
        row = by_way.loc[nodes, link, way]
        return f"{row['images_per_second']:.0f}" + ("" if way == ALONE else f" ({row['part']:.2f})")

    def beside(nodes: int, link: str, other: str = "") -> str:
        share = parts[nodes, link, "auto"] / (parts[nodes, link, other] if other else 1.0)
        return f"{100 * share:.0f} %"

    def faster(way: str) -> str:
        """Return where a way was faster than ours, nothing where it was not."""
        where = [each for each in NETWORKS if each[0] > 1 and parts[(*each, way)] > parts[(*each, "auto")]]
        listed = ", ".join(f"{nodes} nodes at {LIMITS[link]}" for nodes, link in where)
        return f"{way} on {listed}" if listed else ""

    forecast = rows[rows["forecast_seconds"] != ""]
    return {
        "networks": NETWORKS,
        "ways": WAYS,
        "limits": LIMITS,
        "later": LATER,
        "nothing_sent": NOTHING_SENT,
        "cell": cell,
        "beside": beside,
        "unlimited_share": lambda link: f"{100 * parts[4, link, 'auto'] / parts[4, '', 'auto']:.0f} %",
        "faster": faster,
        "forecasts": [
            {**row, "said": 1e3 * float(row["forecast_seconds"]), "took": 1e3 * row["step_seconds"]}
            for row in forecast.to_dict("records")
        ],
        "cycles": cycles,
        "rest": lambda *of: cycles.cell(rests, *of),
        "rest_source": ", ".join(rests["commit"].unique()),
        "told": told_of(pd.concat([rows, rests]), unstamped=UNSTAMPED),
        "source": ", ".join(rows["commit"].unique()),
    }


PAGE = Page(NAME, words)

if __name__ == "__main__":
    sys.exit(main())
