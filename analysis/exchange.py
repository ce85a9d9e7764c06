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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from analysis.benchmarks.launching import environment
from analysis.parts.networks import messages
from analysis.parts.networks.step_times import milliseconds
from analysis.sweeps.kept import RESULTS, commit, machines_of, publish, texts_of
from analysis.sweeps.launching import ROOT, bits_per_second, finish, nodes_up, require_cluster
from analysis.sweeps.options import folder_to_write
from analysis.sweeps.presets import REDUCED
from analysis.sweeps.statistics import mean_interval, paired_difference, paired_ratio, shown
from hvfreeze.comm.horovod_world import open_world
from hvfreeze.comm.reducer import Reducer
from hvfreeze.errors import HvfreezeError
from hvfreeze.model.model_sources import build_model
from hvfreeze.report.tables import factor, to_csv

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
LATE_COMMIT = "0b6c23a"
LATE = "- With 0.1 and 0.5 ms added, exchanges had 0.3 and 0.7 ms: the process woke late then.\n"
"""What holds of exchanges that were measured with that commit."""
HIERARCHICAL = {"OMPI_MCA_coll_han_priority": "100", "OMPI_MCA_coll_han_use_simple_allreduce": "1"}
"""In Open MPI 4.1.4 the pipelined hierarchical sum reads address 0x10001 where ranks sum in place, as Horovod's do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, or with --worker be one rank of it; return 0."""
    parser = argparse.ArgumentParser(prog="python -m analysis.exchange", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=folder_to_write, default=RESULTS / "exchange", help="folder for rows.csv and README.md"
    )
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
    rows, lines = kept(out / "rows.csv"), []
    missing = [network for network in NETWORKS if not measured(rows, *network)]
    if missing or not messages.complete(out / "messages.csv"):
        require_cluster(latency=True)
    for network in NETWORKS:
        if network in missing:
            rows += measure(*network)
            publish(out / "rows.csv", to_csv(rows))
        lines.append(verdict(rows, *network))
        print(lines[-1], flush=True)
    sent = messages.messages(out / "messages.csv")
    print(messages.line(sent))
    publish(out / "README.md", readme([*lines, messages.line(sent)], [*rows, *sent]))


def kept(path: Path) -> list[dict[str, Any]]:
    """Return the rows that are there."""
    numbers = {"nodes": int, "ranks_a_node": int, "repeat": int, "payload_bytes": int, "seconds": float}
    return [{key: numbers.get(key, str)(value) for key, value in row.items()} for row in texts_of(path)]


def measured(
    rows: Sequence[dict[str, Any]], nodes: int, bandwidth: str, each: int, latency: str
) -> list[dict[str, Any]]:
    """Return a network's rows."""
    wanted = {"nodes": nodes, "bandwidth": bandwidth, "ranks_a_node": each, "latency": latency}
    return [row for row in rows if wanted.items() <= row.items()]


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


def verdict(rows: Sequence[dict[str, Any]], nodes: int, bandwidth: str, each: int, latency: str) -> str:
    """Return what the rows say of a network."""
    if latency:
        return later(rows, nodes, bandwidth, latency)
    there = measured(rows, nodes, bandwidth, each, latency)
    names = list(settings(each, latency))
    taken = {name: {row["repeat"]: row["seconds"] for row in there if row["settings"] == name} for name in names}
    payload = there[0]["payload_bytes"]
    line_rate = 8 * 2 * (nodes - 1) / nodes * payload / bits_per_second(bandwidth)
    spans = ", ".join(
        f"{name} {shown(mean_interval(list(values.values())), milliseconds)}" for name, values in taken.items()
    )
    gains = " and ".join(
        f"{shown(paired_ratio(taken[name], taken['ours']), factor, count=True)} as fast as {name}"
        for name in names
        if name != "ours"
    )
    times = mean_interval(list(taken["ours"].values())).mean / line_rate
    ranks = f" of {each} ranks" if each > 1 else ""
    return (
        f"{nodes} nodes{ranks} at {bandwidth}/s, {payload / 1e6:.1f} MB: {spans}; a ring of nodes at line rate "
        f"{milliseconds(line_rate)}, and ours {times:.2f} times that; ours is {gains}"
    )


def later(rows: Sequence[dict[str, Any]], nodes: int, bandwidth: str, latency: str) -> str:
    """Return what added latency costs an exchange, beside wires that take next to nothing."""
    seconds = {
        wait: {row["repeat"]: row["seconds"] for row in measured(rows, nodes, bandwidth, 1, wait)}
        for wait in (NEXT_TO_NOTHING, latency)
    }
    taken = shown(mean_interval(list(seconds[latency].values())), milliseconds)
    said = f"{nodes} nodes at {bandwidth}/s, {latency} added one way: ours {taken}"
    if latency == NEXT_TO_NOTHING:
        return f"{said}, the wires themselves"
    more = paired_difference(seconds[latency], seconds[NEXT_TO_NOTHING])
    return f"{said}, {shown(more, milliseconds)} more than with {NEXT_TO_NOTHING}"


def readme(verdicts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return README.md; `rows` are those of exchanges and of messages."""
    sources = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    claims = "\n".join(f"- {verdict}" for verdict in verdicts)
    return (
        f"# One exchange of ResNet-18's gradients, with Open MPI's settings and with ours\n\n{claims}\n\n"
        "## Limits\n\n"
        "- Links are limited by the kernel, without a switch's latency where none is added; ranks share the cores.\n"
        "- Added latency is that of a process that carries frames of up to 64 KB; it takes a part of a core itself.\n"
        f"{LATE if LATE_COMMIT in sources else ''}"
        "- Packets' headers are 4.5 % on top of the bytes that the line rate is reckoned for.\n"
        "- Nothing is computed meanwhile, so no part of the exchange is hidden.\n\n"
        "## How it was made\n\n"
        f"- `python -m analysis.exchange`: {REPEATS} jobs with each of the settings in turn, each the median of "
        f"{EXCHANGES - 1} exchanges; brackets hold 95 % intervals over jobs (Student's t, ratios paired)\n"
        f"- {machines_of(rows, unstamped=UNSTAMPED)}; source {sources}\n"
        "- numbers: [rows.csv](rows.csv), messages: [messages.csv](messages.csv)\n"
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
