"""How long a message of one number takes from node to node: what the systems need, and the latency that is added."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.benchmarks.launching import environment
from analysis.sweeps.kept import commit, machine, publish, texts_of
from analysis.sweeps.launching import finish, nodes_up, on_nodes
from analysis.sweeps.presets import REDUCED
from hvfreeze.comm.mpi_environment import start_mpi, tune_open_mpi
from hvfreeze.report.tables import to_csv

ADDED = ("", "1us", "100us", "500us")
"""Latency of the links, one way; none is without the process that delays, which takes time itself."""
JOBS, MESSAGES, WARM = 4, 400, 50


def messages(path: Path) -> None:
    """Measure and keep what is missing: a row per job and latency.

    A row has `latency`, `repeat`, `seconds` of a message, and the `commit` and the `machine` that it was measured with.
    """
    rows = texts_of(path).to_dict("records")
    for latency in ADDED:
        if latency not in {row["latency"] for row in rows}:
            stamp = {"latency": latency, "commit": commit(), "machine": machine_with_mpi()}
            rows += [{**stamp, "repeat": repeat, "seconds": seconds} for repeat, seconds in enumerate(measure(latency))]
            publish(path, to_csv(rows))


def machine_with_mpi() -> str:
    """Return where and by what rows are measured that are about MPI alone, with its version."""
    told = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    return machine(f"; {told.splitlines()[0]}, ")


def complete(path: Path) -> bool:
    """Return True if every latency was measured."""
    return path.exists() and set(texts_of(path)["latency"]) == set(ADDED)


def measure(latency: str) -> list[float]:
    """Return the median seconds of a message in each job, on two nodes."""
    found = []
    cluster = REDUCED.run("messages", 0, ranks=2, nodes=2, bandwidth="1gbit")
    with nodes_up(cluster, latency=latency) as (name, _), tempfile.TemporaryDirectory() as folder:
        for repeat in range(JOBS):
            out = Path(folder) / f"{repeat}.json"
            command = [*on_nodes(name, 2, __name__), str(out)]
            finish(command, environment(os.environ), what="messages between two nodes")
            found.append(float(json.loads(out.read_text(encoding="utf-8"))))
    return found


def line(rows: pd.DataFrame) -> str:
    """Return what the messages took, and the straight line through those of links that delay."""
    taken = 1e6 * rows["seconds"].astype(float).groupby(rows["latency"]).median()
    delayed = ADDED[1:]
    added = [float(latency.removesuffix("us")) for latency in delayed]
    slope, base = np.polyfit(added, [taken[latency] for latency in delayed], 1)
    each = ", ".join(
        f"{taken[latency]:.0f} us with a delay of {number:g} us" for latency, number in zip(delayed, added, strict=True)
    )
    return (
        f"A message of one number takes {taken['']:.0f} us from node to node. Over links that delay it takes {each}; "
        f"fitted: {base:.0f} us + {slope:.2f} x delay (medians of {JOBS} jobs)"
    )


def work(out: Path) -> None:
    """Send a number there and back many times. Collective over two ranks."""
    tune_open_mpi()
    comm, number, seconds = start_mpi().COMM_WORLD, np.zeros(1), []
    for _ in range(MESSAGES):
        begun = time.perf_counter()
        for sender in range(2):
            if comm.rank == sender:
                comm.Send(number, dest=1 - sender)
            else:
                comm.Recv(number, source=sender)
        seconds.append((time.perf_counter() - begun) / 2)
    if comm.rank == 0:
        out.write_text(json.dumps(statistics.median(seconds[WARM:])), encoding="utf-8")


if __name__ == "__main__":
    work(Path(sys.argv[1]))
