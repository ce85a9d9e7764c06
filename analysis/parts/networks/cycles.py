"""The cost of Horovod's cycle time, if computing threads fill the cores of the nodes."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import pandas as pd
import torch

from analysis.benchmarks.contest import rotated
from analysis.benchmarks.launching import environment
from analysis.benchmarks.material import HeldSteps, Setting, replicas_of
from analysis.benchmarks.ranks import Ranks
from analysis.parts.networks.sides import BATCH_ROWS, FIRST_STEPS, OURS, SIDE_PIXELS, Way, by_itself, timed
from analysis.parts.networks.tables import NOTHING_SENT
from analysis.sweeps.kept import commit, machine, publish, texts_of
from analysis.sweeps.launching import finish, nodes_up, on_nodes
from analysis.sweeps.presets import REDUCED
from hvfreeze.comm.cycle_time import LONG_CYCLE_MS
from hvfreeze.comm.mpi_environment import CYCLE_TIME
from hvfreeze.report.tables import to_csv

FULL = ((2, 2), (4, 1))
"""Nodes and threads of each that fill the cores of a machine with four."""
CYCLES_MS = (1, LONG_CYCLE_MS)
COMPRESSIONS = ("fp16", "powersgd:4")
LINK = "1gbit"
JOBS, ROUNDS = 4, 3


def cycles(path: Path) -> None:
    """Measure and keep what is missing: a row per job and way.

    A row has `nodes`, `threads` of each, `cycle_ms`, `repeat`, `way`, `seconds` of a step (the median of a job's,
    on the slowest rank), and the `commit` and the `machine` that it was measured with.
    """
    rows = texts_of(path).to_dict("records")
    for nodes, threads in FULL:
        if str(nodes) not in {row["nodes"] for row in rows}:
            rows += measure(nodes, threads)
            publish(path, to_csv(rows))


def complete(path: Path) -> bool:
    """Return True if all nodes were measured."""
    return path.exists() and set(texts_of(path)["nodes"]) == {str(nodes) for nodes, _ in FULL}


def measure(nodes: int, threads: int) -> list[dict[str, str]]:
    """Return the rows of some nodes; the cycles take turns job by job."""
    rows = []
    cluster = REDUCED.run("cycles", 0, ranks=nodes, nodes=nodes, bandwidth=LINK)
    with nodes_up(cluster) as (name, _):
        for repeat in range(JOBS):
            for cycle in rotated(CYCLES_MS, repeat):
                for way, seconds in steps_of_a_job(name, nodes, threads, cycle).items():
                    row = {"nodes": nodes, "threads": threads, "cycle_ms": cycle, "repeat": repeat, "way": way}
                    rows.append({**row, "seconds": seconds, "commit": commit(), "machine": machine("; ")})
    return [{key: str(value) for key, value in row.items()} for row in rows]


def steps_of_a_job(cluster: str, nodes: int, threads: int, cycle: int) -> dict[str, float]:
    """Return the median seconds of a step, by way, of one job."""
    variables = {**environment(os.environ), "OMP_NUM_THREADS": str(threads), CYCLE_TIME: str(cycle)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [*on_nodes(cluster, nodes, __name__), str(threads), str(out), folder]
        finish(command, variables, what=f"{nodes} nodes with {cycle} ms between two looks")
        found: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
    return found


def work(threads: int, out: Path, scratch: Path) -> None:
    """Be one rank of a job. Collective."""
    torch.set_num_threads(threads)
    ranks = Ranks()
    setting = Setting(world=ranks.world, scratch=scratch, batch_rows=BATCH_ROWS, side=SIDE_PIXELS)
    ways = {NOTHING_SENT: Way(by_itself(ranks, scratch, BATCH_ROWS, OURS))}
    for compression in COMPRESSIONS:
        job = setting.job(compression, compression=compression)
        replicas_of(job).reducer.uncompressed_steps = FIRST_STEPS
        ways[compression] = Way(HeldSteps(job).step)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name, way in ways.items():
            seconds[name] += timed(ranks, way, warm=1 if number else way.warm, quick=False)
    if ranks.rank == 0:
        medians = {name: statistics.median(steps) for name, steps in seconds.items()}
        out.write_text(json.dumps(medians), encoding="utf-8")
    ranks.close()


def cell(rows: pd.DataFrame, nodes: int, way: str, cycle: int) -> str:
    """Return the milliseconds of a step: the median of the jobs, the least and the most."""
    mine = rows[(rows[["nodes", "way", "cycle_ms"]] == [str(nodes), way, str(cycle)]).all(axis=1)]
    taken = 1e3 * mine["seconds"].astype(float)
    return f"{taken.median():.0f} ({taken.min():.0f} to {taken.max():.0f})"


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
