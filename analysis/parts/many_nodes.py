"""A whole run on many nodes, forecast: steps and exchange by the model of scaling, the rest as one rank took for it.

The exchange is a range, over the latencies that a network may have. The rest was measured on one machine for one of 256
ranks (`analysis.growth --shares`) and is counted as if nothing hid it, on fewer nodes too: an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.parts.ring import LATENCIES, Model, Point
from hvfreeze.report.tables import Table, percent, seconds

EPOCHS = 10
"""With a vote and a checkpoint in each."""
VOTES = "votes"
ALL_ROWS = "find everybody's rows"


@dataclass(frozen=True)
class Forecast:
    """The seconds of a run; of a pair the first is by the least latency, the second by the most."""

    nodes: int
    work: float
    """Of steps, without what they wait for."""
    exchange: tuple[float, float]
    """That steps wait for."""
    rest: Mapping[str, tuple[float, float]]

    @property
    def beside(self) -> tuple[float, float]:
        """All but steps and exchange."""
        low, high = zip(*self.rest.values())
        return sum(low), sum(high)

    @property
    def efficiency(self) -> tuple[float, float]:
        """The part of ideal throughput, the lower end first."""
        best, worst = (self.work / (self.work + self.exchange[at] + self.beside[at]) for at in (0, 1))
        return worst, best


def forecast(model: Model, point: Point, shares: Mapping[str, Any], *, batch: int) -> Forecast:
    """Return a run of EPOCHS over all images of which `shares` are, with steps of `batch` images a node.

    Args:
        model: its latency is not used.
        point: a step on that many nodes, with cores of their own.
        shares: what `analysis.growth --shares` has kept.
        batch: images.
    """
    steps = EPOCHS * shares["samples"] / (batch * point.nodes)
    models = [replace(model, latency=latency) for latency in (min(LATENCIES), max(LATENCIES))]
    exchange = [steps * (each.step(point) - point.work) for each in models]
    listed = piece(shares, "take what rank 0 has listed")
    same = {
        "listing of images": took(shares, "list the images"),
        "sending and dealing": listed["seconds"]
        + 8 * listed["num_bytes"] / point.bandwidth
        + took(shares, "deal the samples out"),
        "rows of the cache": EPOCHS * took(shares, "find its own rows"),
        "checkpoints": EPOCHS * took(shares, "write a checkpoint"),
    }
    around = 2 * (point.nodes - 1)
    votes = [EPOCHS * (took(shares, "vote,") + around * each.latency) for each in models]
    rest = {**{name: (value, value) for name, value in same.items()}, VOTES: (votes[0], votes[1])}
    return Forecast(point.nodes, steps * point.work, (exchange[0], exchange[1]), rest)


def piece(shares: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """Return the piece of work that begins with these words."""
    found: Mapping[str, Any] = next(each for each in shares["shares"] if each["what"].startswith(what))
    return found


def took(shares: Mapping[str, Any], what: str) -> float:
    """Return the seconds of a piece of work."""
    return float(piece(shares, what)["seconds"])


def table(forecasts: Mapping[str, Sequence[Forecast]], *, samples: int, batch: int, link: str) -> Table:
    """Return a row for each variant and number of nodes: seconds of steps, the rest as a part of these."""
    names = next(iter(forecasts.values()))[0].rest
    rows = tuple(
        (
            variant,
            str(each.nodes),
            seconds(each.work),
            span(tuple(value / each.work for value in each.exchange)),
            *(span(tuple(value / each.work for value in each.rest[name])) for name in names),
            span(each.efficiency),
        )
        for variant, many in forecasts.items()
        for each in many
    )
    title = (
        f"Predicted: {EPOCHS} epochs over {samples:,} images, {batch} a node in a step, at {link}/s, with a vote, a "
        "checkpoint and a rank's look for its own rows in each; seconds of the steps' own work, and what is on top"
    )
    return Table(
        title=title,
        columns=("Variant", "Nodes", "Steps", "Exchange", *(name.capitalize() for name in names), "Of the ideal"),
        rows=rows,
    )


def span(values: Sequence[float]) -> str:
    """Return two parts as percentages, once where they look alike."""
    return " to ".join(dict.fromkeys(percent(value, 0 if value >= 0.1 else 1) for value in values))
