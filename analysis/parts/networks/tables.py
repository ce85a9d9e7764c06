"""What the measurements of networks came to, as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.sweeps.kept import texts_of

LATER = {limit: f"{limit}, 100us" for limit in ("200mbit", "1gbit")}
"""Links that take so long from node to node besides, on two nodes: on four, wires that delay lack a core."""
NETWORKS = [(1, "")] + [(nodes, limit) for limit in ("200mbit", "1gbit", "10gbit", "") for nodes in (2, 4)]
NETWORKS += [(2, link) for link in LATER.values()]
"""Nodes and the link of each: its limit in tc's notation, empty for none, and its latency."""
LIMITS = {"200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "": "no limit"}
LIMITS |= {link: f"{LIMITS[limit]} and 0.1 ms" for limit, link in LATER.items()}
ALONE = "one alone"
"""The first node by itself, while the others rest and nothing of Horovod runs: what all are held against."""
NOTHING_SENT = "nothing sent"
"""Ranks that train beside each other, each for itself: what they lose against one is the machine's doing."""
WAYS = (ALONE, NOTHING_SENT, "auto", "uncompressed", "fp16", "powersgd", "Horovod fp16", "DDP + PowerSGD")


def kept(path: Path) -> list[dict[str, str]]:
    """Return the rows that are there, of networks whose ways were all measured against one node alone."""
    rows = [row for row in texts_of(path) if row.get("part")]
    return [row for nodes, link in NETWORKS if whole(rows, nodes, link) for row in of_network(rows, nodes, link)]


def of_network(rows: Sequence[dict[str, str]], nodes: int, link: str) -> list[dict[str, str]]:
    """Return a network's rows."""
    return [row for row in rows if (row["nodes"], row["bandwidth"]) == (str(nodes), link)]


def whole(rows: Sequence[dict[str, str]], nodes: int, link: str) -> bool:
    """Tell whether every way of training on a network is there."""
    return {row["way"] for row in of_network(rows, nodes, link)} == set(WAYS)


def parts_of(rows: Sequence[dict[str, str]]) -> dict[tuple[str, str, str], float]:
    """Return images/s as a part of as many times one node's alone in the same rounds, by (nodes, link, way)."""
    return {(row["nodes"], row["bandwidth"], row["way"]): float(row["part"]) for row in rows}


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return images/s by network and way, and the part of as many times one node's alone."""
    lines = [f"| nodes | link | {' | '.join(WAYS)} |", "|---:|---|" + "---:|" * len(WAYS)]
    for nodes, bandwidth in NETWORKS:
        if whole(rows, nodes, bandwidth):
            found = {row["way"]: _cell(row) for row in of_network(rows, nodes, bandwidth)}
            cells = [found[way] for way in WAYS]
            lines.append(f"| {nodes} | {bandwidth or 'unlimited'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, str]) -> str:
    part = "" if row["way"] == ALONE else f" ({float(row['part']):.2f})"
    return f"{float(row['images_per_second']):.0f}{part}"


EFFICIENCY = (
    "Scaling efficiency of `auto`, without and with 0.1 ms from node to node; of four nodes their speed beside that "
    "without a limit:"
)


def verdicts(rows: Sequence[dict[str, str]]) -> str:
    """Return what `auto` makes of networks, and who is faster where; nothing while rows are missing."""
    parts = parts_of(rows)
    if len(parts) < len(NETWORKS) * len(WAYS):
        return ""

    def beside(nodes: str, limit: str) -> float:
        return parts[nodes, limit, "auto"] / parts[nodes, limit, NOTHING_SENT]

    def shares(*parts: float) -> list[str]:
        return [f"{100 * part:.0f} %" for part in parts]

    heads = ("`auto` at", "two nodes", "beside `nothing sent`", "with 0.1 ms", "beside `nothing sent`", "four nodes")
    lines = [EFFICIENCY, "", f"| {' | '.join(heads)} |", "|:---|" + "---:|" * (len(heads) - 1)]
    for limit in ("1gbit", "200mbit"):
        near, far = (shares(parts["2", link, "auto"], beside("2", link)) for link in (limit, LATER[limit]))
        four = shares(parts["4", limit, "auto"] / parts["4", "", "auto"])[0]
        lines.append(f"| {' | '.join([LIMITS[limit], *near, *far, four])} |")
    faster = {
        way: [
            f"{nodes} nodes at {LIMITS[limit]}"
            for nodes, limit in NETWORKS
            if nodes > 1 and parts[str(nodes), limit, way] > parts[str(nodes), limit, "auto"]
        ]
        for way in ("Horovod fp16", "DDP + PowerSGD")
    }
    lost = "; ".join(f"{way} on {', '.join(where)}" for way, where in faster.items() if where)
    return "\n".join([*lines, f"\nFaster than `auto`: {lost or 'neither of the other two'}."])


def forecasts(rows: Sequence[dict[str, str]]) -> str:
    """Return what was forecast for each choice of ours, beside what was measured."""
    lines = ["| nodes | link | asked | taken | forecast | measured | off |", "|---:|---|---|---|---:|---:|---:|"]
    for row in rows:
        if row["forecast_seconds"]:
            said, took = float(row["forecast_seconds"]), float(row["step_seconds"])
            lines.append(
                f"| {row['nodes']} | {row['bandwidth'] or 'unlimited'} | {row['way']} | {row['compression']} | "
                f"{1e3 * said:.0f} ms | {1e3 * took:.0f} ms | {100 * (said / took - 1):+.0f} % |"
            )
    return "\n".join(lines)
