"""N nodes, how many times faster? Ours, Horovod with fp16 and DDP with PowerSGD on networks of 200 Mbit/s to 10 Gbit/s.

    python -m analysis.network [--out DIR] [--quick]
    python -m analysis.network --all --data-dir DIR --weights FILE    and communication and exchange after it

On the local cluster of launch/, one rank a node, all ways in turn on the same nodes; a network whose rows are in DIR is
not measured again, so the same command goes on where it was stopped. A step is that of ResNet-18 at 32 pixels on images
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

from analysis.benchmarks.contest import rotated
from analysis.benchmarks.launching import environment
from analysis.parts.networks import cycles
from analysis.parts.networks.sides import BATCH_ROWS, JOBS, LOW_RANK, ROUNDS, measure
from analysis.parts.networks.tables import ALONE, NETWORKS, WAYS, forecasts, kept, of_network, table, whole
from analysis.parts.networks.turns import Turns
from analysis.sweeps.kept import RESULTS, commit, machine, machines_of, publish, texts_of
from analysis.sweeps.launching import ROOT, nodes_up, on_nodes, require_cluster
from analysis.sweeps.options import folder_to_write
from analysis.sweeps.presets import REDUCED
from analysis.sweeps.sweep import SMOKE_RESULTS
from analysis.sweeps.sweep import main as main_of
from hvfreeze.comm.cycle_time import LONG_CYCLE_MS
from hvfreeze.comm.mpi_environment import CYCLE_TIME
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
        rows += [{key: str(value) for key, value in row.items()} for row in rows_of(nodes, link, quick)]
        publish(out / "rows.csv", to_csv(rows))
        publish(out / "README.md", readme(rows, texts_of(looks)))
        print("\n".join(line(row) for row in of_network(rows, nodes, link)))
    if not quick:
        rests = cycles.cycles(looks)
        publish(out / "README.md", readme(rows, rests))
        print(cycles.table(rests))


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
            raise RefusedError(f"{nodes} nodes at {link or 'no limit'}: {error}; run it again to go on") from error
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


def line(row: dict[str, str]) -> str:
    """Return a row for a person who waits."""
    step, pace = 1e3 * float(row["step_seconds"]), float(row["images_per_second"])
    forecast = f", forecast {1e3 * float(row['forecast_seconds']):.0f} ms" if row["forecast_seconds"] else ""
    network = f"{row['nodes']} x {row['bandwidth'] or 'unlimited'}"
    return f"{network:14} {row['way']:15} {pace:6.0f} images/s, {step:6.0f} ms a step {row['compression']}{forecast}"


def readme(rows: Sequence[dict[str, str]], rests: Sequence[dict[str, str]]) -> str:
    """Return README.md; `rests` are the rows of `cycles`."""
    sources = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return (
        "# Training on 1, 2 and 4 nodes, by network and by way of exchanging gradients\n\n"
        "Images a second, and in brackets the part of as many times one node's alone in the same rounds (their "
        f"median). ResNet-18 at 32 pixels, {BATCH_ROWS} images a rank and step, nothing frozen, one rank a node, one "
        f"thread a rank. PowerSGD has rank {LOW_RANK} everywhere.\n\n{table(rows)}\n\n"
        f"What a step was forecast to take after the first few, and took:\n\n{forecasts(rows)}\n\n{rest_told(rests)}"
        "## Limits\n\n"
        "- Nodes are network namespaces of one machine: links are limited by the kernel, cores and memory are shared.\n"
        "- Links have no latency but where it is added, by a process that carries frames and takes part of a core; a\n"
        "  message takes that time too (analysis.exchange has how long).\n"
        "- Where nothing is sent, nodes train each for itself: what they lose against one alone they take from each\n"
        "  other, and Horovod's own threads from them.\n"
        "- On four nodes ranks fill all cores: Horovod rests longer there, in ours as in its own way.\n"
        "- torch's PowerSGD hook ends the process over gloo as it stands; its sums are made one after the other here.\n"
        "- Images are random and in memory; one job a network, its ways in turn. The machine's pace differs from job\n"
        "  to job, so images a second compare within a row, parts between rows.\n\n"
        "## How it was made\n\n"
        f"- `python -m analysis.network`: medians over {ROUNDS} rounds of steps, each on its slowest rank\n"
        f"- {machines_of([*rows, *rests], unstamped=UNSTAMPED)}; source {sources}\n"
        "- numbers: [rows.csv](rows.csv), of Horovod's rest [cycles.csv](cycles.csv)\n"
    )


def rest_told(rests: Sequence[dict[str, str]]) -> str:
    """Return what Horovod's rest between two looks for work comes to, nothing where it was not measured."""
    if not rests:
        return ""
    sources = ", ".join(dict.fromkeys(row["commit"] for row in rests))
    return (
        "## Horovod's rest where cores are full\n\n"
        f"In every cycle all ranks wait for each other. Milliseconds of a step at {cycles.LINK}, median, least and\n"
        f"most of {cycles.JOBS} jobs in turn (source {sources}); a run takes {LONG_CYCLE_MS} ms by itself where\n"
        f"computing threads fill the cores of several nodes, unless `{CYCLE_TIME}` is set:\n\n{cycles.table(rests)}\n\n"
    )


if __name__ == "__main__":
    sys.exit(main())
