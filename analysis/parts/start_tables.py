"""What `analysis.clock --start` has measured, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.parts.start_phases import PHASES, TORCH

Row = dict[str, str]


def columns(ranks: Sequence[dict[str, dict[str, float]]]) -> Row:
    """Return the cells of a start: seconds of rank 0, which waits for the others, and the mean of ranks' CPU seconds.

    `ranks` has for each rank `seconds` and `cpu_seconds` by phase.
    """
    row = {phase: f"{ranks[0]['seconds'][phase]:.2f}" for phase in PHASES}
    for kind in ("seconds", "cpu_seconds"):
        # Rank 0's clock, every rank's processor.
        counted = ranks if kind == "cpu_seconds" else ranks[:1]
        beside = [sum(each[kind].values()) - each[kind][TORCH] for each in counted]
        row[f"beside_torch_{kind}"] = f"{sum(beside) / len(beside):.2f}"
    return row


def table(rows: Sequence[Row]) -> str:
    """Return a line a start."""
    heads = ("data", "ranks", *PHASES, "all but torch", "its CPU seconds")
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for row in rows:
        cells = (row["data"], row["ranks"], *(row[phase] for phase in PHASES))
        cells += (row["beside_torch_seconds"], row["beside_torch_cpu_seconds"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
