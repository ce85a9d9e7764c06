"""What the measurements of networks came to, as tables in Markdown."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

NETWORKS = [(1, "")] + [(nodes, limit) for limit in ("200mbit", "1gbit", "10gbit", "") for nodes in (2, 4)]
WAYS = ("auto", "uncompressed", "fp16", "powersgd", "Horovod fp16", "DDP + PowerSGD")


def kept(path: Path) -> list[dict[str, str]]:
    """Return the rows that are there."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return images/s by network and way, and the part of as many single nodes that ours, uncompressed, make."""
    paces = {(row["nodes"], row["bandwidth"], row["way"]): float(row["images_per_second"]) for row in rows}
    alone = paces.get(("1", "", "uncompressed"), float("nan"))
    lines = [f"| nodes | link | {' | '.join(WAYS)} |", "|---:|---|" + "---:|" * len(WAYS)]
    for nodes, bandwidth in NETWORKS:
        found = [paces.get((str(nodes), bandwidth, way)) for way in WAYS]
        if None not in found:
            cells = [f"{pace:.0f} ({pace / nodes / alone:.2f})" for pace in found if pace is not None]
            lines.append(f"| {nodes} | {bandwidth or 'unlimited'} | {' | '.join(cells)} |")
    return "\n".join(lines)


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
