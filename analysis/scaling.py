"""How far does data-parallel fine-tuning scale, with and without a frozen prefix? A model from measurements.

    python -m analysis.scaling --preset reduced --data-dir DIR --weights FILE

The step's own work is measured on one node, the exchange on two and three nodes of the local cluster at two bandwidths;
four nodes are left out of the fit and predicted. The model then says what up to 256 nodes would do at given bandwidths:

    step(n) = work * crowd + max(0, exchange(n) - hidden * backward * crowd)
    exchange(n) = bytes * (8 / (efficiency * bandwidth) + copying * crowd) + 2 (n - 1) * buckets * latency

bytes = 2 (n - 1) / n * payload, as a ring sends them; crowd = ranks per core where there are more ranks than cores.
Efficiency, copying (a processor's seconds to copy and to sum a byte) and hidden are fitted. The links here have next to
no latency; that of a network is assumed. `analysis.exchange` adds some: what a ring makes of it is lost in the noise of
an exchange of 44.7 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from analysis.communication import FROZEN, short
from analysis.parts import many_nodes
from analysis.parts.growth_pages import shares_in
from analysis.parts.many_nodes import Forecast
from analysis.parts.networks.step_times import milliseconds, phase, step
from analysis.parts.ring import LATENCIES, LATENCY, Model, Point, efficiency, fit
from analysis.sweeps.charts import FULL, METHOD_COLOURS, Line, line_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.launching import bits_per_second
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, mean_interval, shown
from analysis.sweeps.sweep import main
from hvfreeze.report.figures import DASHES
from hvfreeze.report.tables import Table, factor, percent, seconds

FIT, LEFT_OUT = (2, 3), 4
BANDWIDTHS = ("1gbit", "200mbit")
VARIANTS: dict[str, dict[str, Value]] = {"full": {}, "frozen": FROZEN}
WORST_ERROR = 0.2
"""A model that is surely further off than this says nothing."""
PREDICTED_NODES = (2, 4, 8, 16, 32, 64, 128, 256)
PREDICTED_BANDWIDTHS = ("1gbit", "10gbit", "25gbit")
WHOLE_NODES, WHOLE_BANDWIDTH = (16, 64, 256), "10gbit"
"""Of whole runs."""


def runs(preset: Preset) -> list[PlannedRun]:
    """Return the runs that are measured."""
    if preset.is_smoke:
        return [short(preset, "full", nodes, bandwidth, {}) for nodes, bandwidth in ((1, ""), (2, "200mbit"))]
    networks = [(1, ""), *((nodes, limit) for nodes in (*FIT, LEFT_OUT) for limit in BANDWIDTHS)]
    return [
        short(preset, name, nodes, limit, flags, seed)
        for seed in preset.seeds
        for nodes, limit in networks
        for name, flags in VARIANTS.items()
    ]


def points_of(results: Results) -> list[Point]:
    """Return the measured steps on several nodes."""
    alone = {variant_of(row["label"]): str(row["label"]) for row in results.rows if row["ranks"] == 1}
    found = []
    for label in results.labels:
        row, single = results.of(label)[0], alone.get(variant_of(label))
        if row["ranks"] == 1 or single is None or not row["bandwidth"]:
            continue
        found.append(
            Point(
                variant=variant_of(label),
                nodes=row["ranks"],
                bandwidth=bits_per_second(row["bandwidth"]),
                work=results.mean(single, "step_seconds").mean,
                backward=results.mean(single, "step_backward").mean,
                payload=row["allreduce_bytes"] / row["steps"],
                cores=int(results.runs[row["run"]].environment.get("cores") or 1),
                seconds=results.mean(label, "step_seconds").mean,
            )
        )
    return found


def variant_of(label: str) -> str:
    """Return the variant that a label begins with."""
    return label.partition("-")[0]


def variants_of(points: Sequence[Point]) -> list[str]:
    """Return the variants that were measured."""
    return [name for name in VARIANTS if any(point.variant == name for point in points)]


def answers(results: Results) -> list[Answer]:
    """Return how well the left-out size is predicted, and what the model says of many nodes."""
    points = points_of(results)
    known, left_out = [p for p in points if p.nodes in FIT], [p for p in points if p.nodes == LEFT_OUT]
    if not known or not left_out or {point.variant for point in points} != set(VARIANTS):
        return []
    model = fit(known)
    errors = mean_interval([abs(model.step(point) - point.seconds) / point.seconds for point in left_out])
    large = {name: predicted(points, name, 256, "10gbit") for name in VARIANTS}
    assumed = [replace(model, latency=latency) for latency in LATENCIES]
    full, frozen = ([efficiency(each, large[name]) for each in assumed] for name in VARIANTS)
    gains = [each.step(large["full"]) / each.step(large["frozen"]) for each in assumed]
    text = (
        f"256 nodes at 10 Gbit/s would give {percent(full[-1], 0)} to {percent(full[0], 0)} of ideal throughput, by "
        f"the network's latency; the model misses {LEFT_OUT} measured nodes by {shown(errors, percent, count=True)}."
    )
    details = (
        (
            f"The model is fitted on {' and '.join(map(str, FIT))} nodes; the {LEFT_OUT} are left out, and its error "
            "is a mean."
        ),
        (
            f"For {1e6 * LATENCIES[-1]:.0f} to {1e6 * LATENCIES[0]:.0f} microseconds a message, which are a network's "
            f"own, 256 nodes give {percent(full[-1], 0)} to {percent(full[0], 0)} in full and "
            f"{percent(frozen[-1], 0)} to {percent(frozen[0], 0)} with four stages frozen, whose step is "
            f"{factor(min(gains))} to {factor(max(gains))} as fast."
        ),
        f"At the {1e6 * LATENCY:.0f} microseconds of the figures: {percent(full[1], 0)} and {percent(frozen[1], 0)}.",
        "One switch that keeps up, and a core for every rank, are assumed.",
    )
    question = "How far does it scale?"
    negative = errors.low > WORST_ERROR or max(gains) < 1
    return [
        Answer(question=question, text=text, n=errors.n, negative=negative, details=details),
        *whole_answers(results, points, model),
    ]


def whole_answers(results: Results, points: Sequence[Point], model: Model) -> list[Answer]:
    """Return what a whole run on many nodes would wait for first."""
    shares = shares_of(results)
    if shares is None:
        return []
    full, frozen = (whole_runs(results, points, model, shares)[name] for name in VARIANTS)
    last = full[-1]
    low, high = (value / last.work for value in last.exchange)
    beside = last.beside[1] / last.work
    most = max(last.rest, key=lambda name: last.rest[name][1])
    first = "the exchange of gradients" if high > beside else most
    text = (
        f"{first.capitalize()}. On {last.nodes} nodes at 10 Gbit/s the exchange adds {percent(low, 0)} to "
        f"{percent(high, 0)} to the steps' own time, all else together {percent(beside, 0)}."
    )
    details = (
        (
            f"Of all else {most} takes the most, {seconds(last.rest[most][1])} in a run whose steps take "
            f"{seconds(last.work)}. Votes take at most {seconds(last.rest[many_nodes.VOTES][1])}."
        ),
        "The whole run is at "
        + "; ".join(
            f"{each.nodes} nodes {many_nodes.span(each.efficiency)} of the ideal in full, "
            f"{many_nodes.span(other.efficiency)} with four stages frozen"
            for each, other in zip(full, frozen)
        )
        + ".",
        (
            "With `--shuffle global` a rank takes in everybody's rows of the cache, which is not counted: "
            f"{seconds(many_nodes.took(shares, many_nodes.ALL_ROWS))}."
        ),
        "Steps and exchange are the model's; the rest was measured for one rank of 256, without a network.",
    )
    return [Answer(question="What breaks first on many nodes?", text=text, n=1, details=details)]


def shares_of(results: Results) -> Mapping[str, Any] | None:
    """Return what one rank of many does beside training; None where the kept results have no such line."""
    return shares_in(results.directory.parent / "growth")


def whole_runs(
    results: Results, points: Sequence[Point], model: Model, shares: Mapping[str, Any]
) -> dict[str, list[Forecast]]:
    """Return for each variant whole runs on WHOLE_NODES."""
    return {
        name: [
            many_nodes.forecast(model, predicted(points, name, nodes, WHOLE_BANDWIDTH), shares, batch=batch_of(results))
            for nodes in WHOLE_NODES
        ]
        for name in variants_of(points)
    }


def batch_of(results: Results) -> int:
    """Return the images of a node in a step."""
    return int(results.rows[0]["batch_size"])


def predicted(points: Sequence[Point], variant: str, nodes: int, bandwidth: str) -> Point:
    """Return a step on a network that was not measured, with a core for every node."""
    like = next(point for point in points if point.variant == variant)
    return Point(
        variant=variant,
        nodes=nodes,
        bandwidth=bits_per_second(bandwidth),
        work=like.work,
        backward=like.backward,
        payload=like.payload,
        cores=nodes,
    )


def tables(results: Results) -> list[Table]:
    """Return measured against predicted steps, and the predictions."""
    points = points_of(results)
    known = [point for point in points if point.nodes in FIT]
    if not known:
        return []
    model = fit(known)
    checked = tuple(
        (
            point.variant,
            nodes_text(results, point),
            f"{point.bandwidth / 1e6:.0f} Mbit/s",
            milliseconds(point.seconds),
            milliseconds(model.step(point)),
            percent(model.step(point) / point.seconds - 1, 0),
        )
        for point in points
    )
    variants = variants_of(points)
    columns = tuple(f"{name}, {limit}/s" for name in variants for limit in PREDICTED_BANDWIDTHS)
    forecast = tuple(
        (
            str(nodes),
            *(
                percent(efficiency(model, predicted(points, name, nodes, limit)), 0)
                for name in variants
                for limit in PREDICTED_BANDWIDTHS
            ),
        )
        for nodes in PREDICTED_NODES
    )
    found = (
        f"Fitted: {percent(model.efficiency, 0)} of the line rate, {1e9 * model.copying:.1f} ns of a processor for "
        f"every byte sent, {percent(model.hidden, 0)} of the backward pass hides the exchange; * more ranks than cores"
    )
    titles = ("Variant", "Nodes", "Link", "Measured step", "Model", "Error")
    shares = shares_of(results)
    made = [
        Table(title=found, columns=titles, rows=checked),
        Table(title="Predicted part of ideal throughput", columns=("Nodes", *columns), rows=forecast),
    ]
    if shares is not None:
        whole, batch = whole_runs(results, points, model, shares), batch_of(results)
        made.append(many_nodes.table(whole, samples=shares["samples"], batch=batch, link=WHOLE_BANDWIDTH))
    return made


def nodes_text(results: Results, point: Point) -> str:
    """Return a point's nodes with what is special about its runs."""
    machines = {
        results.machine(row)
        for row in results.rows
        if (variant_of(row["label"]), row["ranks"]) == (point.variant, point.nodes)
        and bits_per_second(row["bandwidth"]) == point.bandwidth
    }
    crowded, out = " *" if point.crowd > 1 else "", " (left out)" if point.nodes == LEFT_OUT else ""
    return f"{point.nodes}{crowded}{out}{' (two machines)' if len(machines) > 1 else ''}"


def drawings(results: Results) -> list[Drawing]:
    """Return measured and modelled steps, and the predicted efficiency."""
    points = points_of(results)
    known = [point for point in points if point.nodes in FIT]
    if not known:
        return []
    model = fit(known)
    variants = variants_of(points)
    lines, forecast = [], []
    for name in variants:
        colour = METHOD_COLOURS[FULL if name == "full" else "frozen from the start"]
        for dash, marker, limit in zip(DASHES, "os", BANDWIDTHS):
            mine = [p for p in points if p.variant == name and p.bandwidth == bits_per_second(limit)]
            seconds = {p.nodes: interval_of(results, p, limit) for p in mine}
            modelled = {p.nodes: exact(model.step(p)) for p in mine}
            lines.append(Line(label=f"{name}, {limit}/s", points=seconds, colour=colour, dash="", marker=marker))
            # Without a name in the legend.
            lines.append(Line(label="_", points=modelled, colour=colour, dash=dash, marker=""))
        for dash, limit in zip(DASHES, PREDICTED_BANDWIDTHS):
            values = {n: exact(efficiency(model, predicted(points, name, n, limit))) for n in PREDICTED_NODES}
            forecast.append(Line(label=f"{name}, {limit}/s", points=values, colour=colour, dash=dash))
    return [
        Drawing(
            name="model",
            caption=(
                f"Measured steps (mean and 95 % interval over runs, over the epochs of one) and the model (lines); "
                f"{LEFT_OUT} nodes were left out of the fit."
            ),
            figure=line_chart(lines, x="nodes", y="a step (s)"),
        ),
        Drawing(
            name="prediction",
            caption=(
                f"Predicted throughput as a part of the ideal, with {1e6 * LATENCY:.0f} microseconds a message "
                "assumed: a model's extrapolation, not a measurement."
            ),
            figure=line_chart(forecast, x="nodes", y="part of ideal throughput (%)", scale=100, log_x=True),
        ),
    ]


def interval_of(results: Results, point: Point, limit: str) -> Interval:
    """Return the spread of a measured step over its runs, over the epochs of one."""
    runs = results.runs_of(f"{point.variant}-{point.nodes}x-{limit}")
    return step(runs) if phase(runs, "backward").n else exact(point.seconds)


def exact(value: float) -> Interval:
    """Return a number without a spread."""
    return Interval(value, float("nan"), float("nan"), 1)


EXPERIMENT = Experiment(
    name="scaling",
    title="A model of scaling, checked on a size left out of its fit",
    runs=runs,
    answers=answers,
    tables=tables,
    drawings=drawings,
    shown=3,
    limits=(
        "Beyond four nodes nothing was measured: these numbers are an extrapolation.",
        "Where ranks outnumber cores (*) the model accounts for that by more work, not by contention.",
        f"One switch without oversubscription, a ring; {1e6 * LATENCY:.0f} microseconds a message are an assumption.",
        "The links here have next to no latency; what some more does to an exchange is in analysis.exchange.",
        "Whole runs count as if nothing hid votes, checkpoints and the cache's index; reading images is in no number.",
        "Copying was measured between nodes that share a kernel and its cores; network adapters spare some of it.",
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
