"""The command line of launch/cluster.

launch/cluster up --nodes 4 --bandwidth 1gbit
launch/cluster run -- horovodrun -np 4 python -m hvfreeze train ...
launch/cluster status
launch/cluster down
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import cluster_link
from cluster_state import Cluster, ClusterError, Plan, clusters, load
from local_cluster import cut_power, down, missing, run, traffic, up

LAUNCHERS = ("horovodrun", "horovodrun.sh", "mpirun", "mpirun.sh", "mpiexec")
HOST_FLAGS = ("-H", "-host", "--host", "-hosts", "--hosts", "-hostfile", "--hostfile", "-machinefile", "--machinefile")


def with_hosts(command: Sequence[str], hosts: str) -> list[str]:
    """Return `command` with `-H hosts` after its first launcher word, unless it names hosts itself.

    horovodrun is also kept from caching, in the user's home, which hosts answered.
    """
    filled = list(command)
    for index, word in enumerate(filled):
        if Path(word).name in LAUNCHERS:
            if not any(later.split("=")[0] in HOST_FLAGS for later in filled[index:]):
                filled[index + 1 : index + 1] = ["-H", hosts]
            if Path(word).name == "horovodrun" and "--disable-cache" not in filled:
                filled.insert(index + 1, "--disable-cache")
            break
    return filled


def _chosen(name: str | None) -> Cluster:
    """Return the named cluster, or the only one."""
    names = clusters()
    if name is None and len(names) == 1:
        return load(names[0])
    if name in names:
        return load(str(name))
    if not names:
        raise ClusterError("no cluster is up; run launch/cluster up --nodes 4")
    raise ClusterError(f"--name ({name}) must be one of {', '.join(names)}")


def print_status(names: Sequence[str], *, as_json: bool) -> None:
    """Print these clusters' nodes and the bytes at their interfaces; one that is not up yet only says so."""
    found = []
    for name in names:
        try:
            found.append(load(name))
        except ClusterError as error:
            print(error, file=sys.stderr)
    if as_json:
        print(json.dumps([{**dataclasses.asdict(cluster), "traffic": traffic(cluster)} for cluster in found]))
        return
    for cluster in found:
        limit = cluster.bandwidth or "no bandwidth limit"
        late = f", latency {1000.0 * cluster.latency:g} ms" if cluster.latency else ""
        print(f"{cluster.name}: {len(cluster.nodes)} nodes, {limit}{late}, -H {cluster.hosts}")
        _print_traffic(cluster, traffic(cluster))
    if not names:
        print("no cluster is up")


def _print_traffic(cluster: Cluster, counted: dict[str, tuple[int, int]]) -> None:
    print(f"  {'node':8} {'address':12} {'sent bytes':>15} {'received bytes':>15}")
    for node in cluster.nodes:
        sent, received = counted.get(node.name, ("dead", ""))
        print(f"  {node.name:8} {node.address:12} {sent:>15} {received:>15}", flush=True)


def _rate(text: str) -> str:
    if text and not re.fullmatch(r"[0-9]+(\.[0-9]+)?[kmg]?bit", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 1gbit or 200mbit")
    return text


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms)", text)
    if not found or not 0 < float(found[1]) * {"us": 1e-6, "ms": 1e-3}[found[2]] <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of at most 1 s such as 100us or 0.5ms")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3}[found[2]]


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 to 32 letters, digits, - and _")
    return text


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 200:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 200")
    return int(text)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description="A cluster of several nodes on one machine.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser(
        "check", help=("check whether this machine can run a cluster; exit code 2 if something is missing")
    )
    verb.add_argument("--latency", action="store_true", help="also check what `up --latency` needs")
    verb = verbs.add_parser("up", help="start a cluster")
    verb.add_argument("--nodes", type=_count, default=4)
    verb.add_argument(
        "--bandwidth", type=_rate, default="", help="bandwidth limit of every node in both directions: 1gbit, 200mbit"
    )
    verb.add_argument("--latency", type=_seconds, default=0.0, help="one-way latency between nodes: 100us, 0.5ms")
    verb.add_argument("--slots", type=_count, default=1, help="ranks per node")
    verb.add_argument("--disk", default="1g", help="size of the private $TMPDIR of each node (in memory)")
    verb.add_argument("--name", type=_name, help="default: c0, c1, ...")
    verb.add_argument("--owner", type=int, metavar="PID", help="stop the cluster when this process ends")
    verb = verbs.add_parser("run", help="run a command on a node, with -H inserted after horovodrun or mpirun")
    verb.add_argument("--name")
    verb.add_argument("--on", default="node0", metavar="NODE")
    verb.add_argument(
        "--bytes", action="store_true", help=("print the bytes that each node sent and received meanwhile")
    )
    verb.add_argument("command", nargs="+")
    verb = verbs.add_parser("kill", help="kill a node, as if it lost power")
    verb.add_argument("--name")
    verb.add_argument("node")
    verb = verbs.add_parser("status", help="print the nodes and the bytes that they sent and received")
    verb.add_argument("--name")
    verb.add_argument("--json", action="store_true")
    verb = verbs.add_parser("down", help="stop a cluster")
    verb.add_argument("--name")
    verb.add_argument("--all", action="store_true")
    return parser


def main(
    argv: Sequence[str],
    *,
    program: str = "launch/cluster",
    lacking: Callable[[], list[str]] = missing,
    prepare: Callable[[Cluster], Cluster] = lambda cluster: cluster,
) -> int:
    """Run the command line; return 0 for success, 1 for failure, 2 for usage or a missing requirement, or `run`'s code.

    Args:
        argv: verb and options.
        program: name in messages.
        lacking: returns missing requirements of the machine.
        prepare: called by `up` on the nodes of a new cluster.
    """
    arguments = _parser(program).parse_args(argv)
    try:
        if arguments.verb in ("check", "up") and (gaps := [*lacking(), *_lacking_for(arguments.latency)]):
            print("\n".join(f"{program}: {gap}" for gap in gaps), file=sys.stderr)
            return 2
        if arguments.verb == "up":
            _up(arguments, prepare)
            return 0
        return _do(arguments)
    except ClusterError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _lacking_for(latency: float) -> list[str]:
    refusal = cluster_link.refusal() if latency else ""
    return [refusal] if refusal else []


def _up(arguments: argparse.Namespace, prepare: Callable[[Cluster], Cluster]) -> None:
    plan = Plan(arguments.nodes, arguments.slots, arguments.bandwidth, arguments.disk, arguments.latency)
    cluster = up(plan, name=arguments.name, owner=arguments.owner)
    try:
        prepare(cluster).save()
    except BaseException:
        down(cluster.name)
        raise
    print_status([cluster.name], as_json=False)


def _do(arguments: argparse.Namespace) -> int:
    if arguments.verb == "run":
        return _run(arguments)
    if arguments.verb == "kill":
        cut_power(_chosen(arguments.name), arguments.node)
    elif arguments.verb == "status":
        print_status([_chosen(arguments.name).name] if arguments.name else clusters(), as_json=arguments.json)
    elif arguments.verb == "down":
        names = clusters()
        for name in names if arguments.all else [arguments.name or (_chosen(None).name if names else "")]:
            down(name)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    cluster = _chosen(arguments.name)
    before = traffic(cluster)
    code = run(cluster, cluster.node(arguments.on), with_hosts(arguments.command, cluster.hosts))
    if arguments.bytes:
        after = traffic(cluster)
        spent = {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after}
        _print_traffic(cluster, spent)
    return code
