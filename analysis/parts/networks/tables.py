"""The networks and the ways of training on them that are measured, and the rows that are kept."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

LATER = {limit: f"{limit}, 100us" for limit in ("200mbit", "1gbit")}
"""Links that take so long from node to node besides, on two nodes: on four, wires that delay lack a core."""
NETWORKS = [(1, "")] + [(nodes, limit) for limit in ("200mbit", "1gbit", "10gbit", "") for nodes in (2, 4)]
NETWORKS += [(2, link) for link in LATER.values()]
"""Nodes and the link of each: its limit in tc's notation, empty for none, and its latency."""
LIMITS = {"200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "": "no limit"}
LIMITS |= {link: f"{LIMITS[limit]} and 0.1 ms" for limit, link in LATER.items()}
ALONE = "one alone"
"""The first node alone, without Horovod, while the others are idle: the reference of all."""
NOTHING_SENT = "nothing sent"
"""Ranks that train at the same time without communication: their loss against one comes from the machine."""
WAYS = (ALONE, NOTHING_SENT, "auto", "uncompressed", "fp16", "powersgd", "Horovod fp16", "DDP + PowerSGD")


def kept(path: Path) -> pd.DataFrame:
    """Return the rows that are there, of networks whose ways were all measured against one node alone."""
    if not path.exists():
        return pd.DataFrame(columns=["nodes", "bandwidth", "way", "part"])
    rows = pd.read_csv(path, keep_default_na=False)
    rows = rows[rows["part"] != ""]
    whole_ones = [of_network(rows, *network) for network in NETWORKS if whole(rows, *network)]
    return pd.concat(whole_ones) if whole_ones else rows[:0]


def of_network(rows: pd.DataFrame, nodes: int, link: str) -> pd.DataFrame:
    """Return a network's rows."""
    return rows[(rows["nodes"] == nodes) & (rows["bandwidth"] == link)]


def whole(rows: pd.DataFrame, nodes: int, link: str) -> bool:
    """Return True if every way of training on a network was measured."""
    return set(of_network(rows, nodes, link)["way"]) == set(WAYS)
