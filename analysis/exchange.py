"""How long does an exchange of ResNet-18's gradients take, with Open MPI's own settings and with ours?

    python -m analysis.exchange [--out DIR]

On the local cluster of launch/, settings in turn; DIR gets rows.csv and README.md, and a network whose rows it has is
not measured again. Ours are those of `hvfreeze.comm.mpi_environment.tune_open_mpi`, where nothing is set
beforehand. With several ranks a node, also Open MPI's hierarchical sums: first in each node, then between nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from analysis.benchmarks.launching import environment
from analysis.parts.networks import messages
from analysis.sweeps.kept import RESULTS, commit, publish, texts_of, told_of
from analysis.sweeps.launching import ROOT, bits_per_second, finish, nodes_up, require_cluster
from analysis.sweeps.options import folder_to_write
from analysis.sweeps.pages import Page, Words, milliseconds
from analysis.sweeps.presets import REDUCED
from analysis.sweeps.statistics import mean_interval, paired_difference, paired_ratio, shown
from hvfreeze.comm.horovod_world import open_world
from hvfreeze.comm.reducer import Reducer
from hvfreeze.errors import HvfreezeError
from hvfreeze.model.model_sources import build_model
from hvfreeze.report.tables import factor, to_csv

NAME = "exchange"
NEXT_TO_NOTHING, LATENCIES = "1us", ("100us", "500us")
"""One way from node to node; the wires that delay take a little themselves."""
NETWORKS = (
    *((nodes, "1gbit", 1, "") for nodes in (2, 3, 4)),
    *((nodes, "200mbit", 1, "") for nodes in (2, 4)),
    (2, "1gbit", 2, ""),
    *((nodes, "1gbit", 1, latency) for nodes in (2, 3) for latency in (NEXT_TO_NOTHING, *LATENCIES)),
)
"""Nodes, link, ranks a node, latency."""
REPEATS, EXCHANGES = 4, 4
THEIRS = {
    "OMPI_MCA_btl_tcp_eager_limit": "65536",
    "OMPI_MCA_btl_tcp_max_send_size": "131072",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "0",
}
"""Open MPI 4.1.4's own values."""
SETTINGS: dict[str, dict[str, str]] = {"Open MPI's": THEIRS, "ours": {}}
UNSTAMPED = "AMD EPYC, 4 cores; mpirun (Open MPI) 4.1.4, torch 2.13.0+cpu, horovod 0.28.1"
"""Machine and versions of kept rows that name none."""
HIERARCHICAL = {"OMPI_MCA_coll_han_priority": "100", "OMPI_MCA_coll_han_use_simple_allreduce": "1"}
"""Open MPI 4.1.4's pipelined hierarchical allreduce reads address 0x10001 if ranks sum in place, as Horovod's do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, or with --worker be one rank of it; return 0."""
    parser = argparse.ArgumentParser(prog="python -m analysis.exchange", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=folder_to_write, default=RESULTS / NAME, help="folder for rows.csv and README.md")
    parser.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        work(options.worker)
        return 0
    try:
        measure_missing(options.out)
    except HvfreezeError as error:
        print(f"exchange: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measure_missing(out: Path) -> None:
    """Measure the networks and messages that have no rows, and write them up one by one.

    Raises:
        UsageError: this machine cannot have the nodes, or links that delay.
        RefusedError: nodes did not come up; what was measured before is kept.
    """
    rows = kept(out / "rows.csv")
    missing = [network for network in NETWORKS if measured(rows, *network).empty]
    if missing or not messages.complete(out / "messages.csv"):
        require_cluster(latency=True)
    for network in missing:
        rows = pd.concat([rows, pd.DataFrame(measure(*network))])
        publish(out / "rows.csv", to_csv(rows.to_dict("records")))
        print(verdict(rows, *network), flush=True)
    messages.messages(out / "messages.csv")
    PAGE.write(out.parent, out)


def kept(path: Path) -> pd.DataFrame:
    """Return the rows that are there."""
    columns = ["nodes", "bandwidth", "ranks_a_node", "latency", "settings", "repeat", "payload_bytes", "seconds"]
    return pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame(columns=columns)


def measured(rows: pd.DataFrame, nodes: int, bandwidth: str, each: int, latency: str) -> pd.DataFrame:
    """Return a network's rows."""
    wanted = {"nodes": nodes, "bandwidth": bandwidth, "ranks_a_node": each, "latency": latency}
    return rows[(rows[list(wanted)] == list(wanted.values())).all(axis=1)]


def settings(each: int, latency: str) -> dict[str, dict[str, str]]:
    """Return what is compared with so many ranks a node; with latency added, ours alone."""
    if latency:
        return {"ours": {}}
    return {**SETTINGS, "node by node": HIERARCHICAL} if each > 1 else SETTINGS


def measure(nodes: int, bandwidth: str, each: int, latency: str) -> list[dict[str, Any]]:
    """Return a row per job: the median seconds of its exchanges."""
    rows = []
    cluster = REDUCED.run("exchange", 0, ranks=nodes * each, nodes=nodes, bandwidth=bandwidth)
    with nodes_up(cluster, latency=latency) as (name, _), tempfile.TemporaryDirectory() as folder:
        for repeat in range(REPEATS):
            for setting, variables in settings(each, latency).items():
                found = Path(folder) / f"{repeat}-{setting}.json"
                job = [str(ROOT / "launch/horovodrun.sh"), "-np", str(nodes * each), "env"]
                job += [f"{key}={value}" for key, value in variables.items()]
                job += [sys.executable, "-m", "analysis.exchange", "--worker", str(found)]
                command = [str(ROOT / "launch/cluster"), "run", "--name", name, "--", *job]
                finish(command, environment(os.environ), what=f"{setting} on {nodes} nodes at {bandwidth}/s")
                told = json.loads(found.read_text(encoding="utf-8"))
                row = {"nodes": nodes, "bandwidth": bandwidth, "ranks_a_node": each, "latency": latency}
                row |= {"settings": setting, "commit": commit(), "machine": messages.machine_with_mpi()}
                seconds = statistics.median(told["seconds"])
                rows.append({**row, "repeat": repeat, "payload_bytes": told["bytes"], "seconds": seconds})
    return rows


def taken(rows: pd.DataFrame, network: tuple[int, str, int, str], setting: str = "ours") -> dict[int, float]:
    """Return the seconds of an exchange by job."""
    mine = measured(rows, *network)
    return dict(mine[mine["settings"] == setting].set_index("repeat")["seconds"])


def verdict(rows: pd.DataFrame, nodes: int, bandwidth: str, each: int, latency: str) -> str:
    """Return what the rows say of a network."""
    network = (nodes, bandwidth, each, latency)
    if latency:
        more = paired_difference(taken(rows, network), taken(rows, (nodes, bandwidth, each, NEXT_TO_NOTHING)))
        beside = f"{shown(more, milliseconds)} more than with {NEXT_TO_NOTHING}"
        told = shown(mean_interval(list(taken(rows, network).values())), milliseconds)
        beside = "the wires themselves" if latency == NEXT_TO_NOTHING else beside
        return f"{nodes} nodes at {bandwidth}/s, {latency} added one way: hvfreeze {told}, {beside}"
    found = {name: taken(rows, network, name) for name in settings(each, latency)}
    payload = measured(rows, *network)["payload_bytes"].iloc[0]
    line_rate = 8 * 2 * (nodes - 1) / nodes * payload / bits_per_second(bandwidth)
    spans = ", ".join(
        f"{name} {shown(mean_interval(list(values.values())), milliseconds)}" for name, values in found.items()
    )
    gains = " and ".join(
        f"{shown(paired_ratio(found[name], found['ours']), factor, count=True)} the speed of {name}"
        for name in found
        if name != "ours"
    )
    times = mean_interval(list(found["ours"].values())).mean / line_rate
    ranks = f" of {each} ranks" if each > 1 else ""
    return (
        f"{nodes} nodes{ranks} at {bandwidth}/s, {payload / 1e6:.1f} MB: {spans}; a ring of nodes at line rate "
        f"{milliseconds(line_rate)}, and hvfreeze's {times:.2f} times that; it has {gains}"
    )


def words(root: Path) -> Words:
    rows, sent = kept(root / NAME / "rows.csv"), texts_of(root / NAME / "messages.csv")
    return {
        "verdicts": [verdict(rows, *network) for network in NETWORKS],
        "messages": messages.line(sent),
        "told": told_of(pd.concat([rows, sent]), unstamped=UNSTAMPED),
    }


PAGE = Page(NAME, words)


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
