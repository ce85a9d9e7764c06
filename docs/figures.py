"""Draws the figures of the guides into docs/figures: python docs/figures.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

FOLDER = Path(__file__).resolve().parent / "figures"
FROZEN, TRAINED, STORED, SENT, INK, PALE = "#9dc3d4", "#f2b77c", "#c9dfb5", "#b4472f", "#263238", "#e8ecef"
BLOCKS = ("stem", "layer1", "layer2", "layer3", "layer4", "head")
SETTINGS = {
    "font.size": 12,
    "font.family": "DejaVu Sans",
    "svg.hashsalt": "hvfreeze",
    "svg.fonttype": "path",
    "text.color": INK,
}


def canvas(width: float, height: float) -> Any:
    """Return empty axes of this size in inches; a unit is an inch."""
    figure = pyplot.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(
    axes: Any, x: float, y: float, width: float, height: float, text: str = "", colour: str = PALE, **how: Any
) -> None:
    """Draw a box with a text in its middle."""
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.05", fc=colour, ec=INK, lw=0.8)
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", linespacing=1.25, **how)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str = INK, **how: Any) -> None:
    """Draw an arrow."""
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.4, "shrinkA": 0, "shrinkB": 0, **how}
    )


def chain() -> None:
    """Draw blocks, a cut, and what each side of it costs."""
    axes = canvas(6.2, 3.3)
    step, size, y = 1.0, 0.84, 1.72
    for number, name in enumerate(BLOCKS):
        box(axes, 0.15 + number * step, y, size, 0.6, name, FROZEN if number < 3 else TRAINED)
        if number:
            arrow(axes, (0.15 + number * step - step + size, y + 0.3), (0.15 + number * step, y + 0.3))
    cut = 0.15 + 3 * step - (step - size) / 2
    axes.plot([cut, cut], [0.15, 3.0], color=SENT, lw=1.6, ls=(0, (4, 2)))
    axes.text(cut, 3.12, "cut = 3", color=SENT, ha="center", va="center", weight="bold")
    axes.text(0.15, 2.7, "frozen prefix", weight="bold", va="center")
    axes.text(cut + 0.2, 2.7, "suffix: trained", weight="bold", va="center")
    for number in range(5, 2, -1):
        x = 0.15 + number * step
        arrow(axes, (x + size - 0.1, y - 0.14), (x + 0.1, y - 0.14), SENT)
    axes.text(cut + 0.2, 1.2, "backward pass", color=SENT, va="center")
    axes.text(cut + 0.2, 0.86, "gradients exchanged\nwith the other ranks", va="top", linespacing=1.3)
    axes.text(0.15, 1.42, "forward pass only", va="center")
    box(axes, 0.15, 0.3, 2.0, 0.68, "activation cache\n(HDF5)", STORED)
    axes.plot([cut, cut], [0.64, 0.64], color=INK)
    arrow(axes, (cut, 0.64), (2.17, 0.64), connectionstyle="arc3")
    save(axes, "chain")


def vote() -> None:
    """Draw proposals of four ranks, their tally and the decision."""
    axes = canvas(6.2, 3.5)
    proposals, weights = (1, 3, 2, 3), (1, 1, 2, 1)
    axes.text(0.15, 3.25, "each rank proposes a cut", weight="bold", va="center")
    for rank, (proposal, weight) in enumerate(zip(proposals, weights)):
        y = 2.6 - rank * 0.62
        axes.text(0.15, y + 0.2, f"rank {rank}", va="center")
        for block in range(4):
            box(axes, 0.85 + block * 0.34, y, 0.3, 0.4, "", FROZEN if block < proposal else PALE)
        axes.text(2.3, y + 0.2, f"weight {weight}", va="center")
    axes.text(3.4, 3.25, "support of each cut", weight="bold", va="center")
    total = sum(weights)
    for cut in range(1, 5):
        support = sum(weight for proposal, weight in zip(proposals, weights) if proposal >= cut)
        y = 2.6 - (cut - 1) * 0.62
        axes.text(3.4, y + 0.2, f"cut {cut}", va="center")
        if support:
            box(axes, 4.0, y, support * 0.36, 0.4, "", FROZEN if support >= total / 2 else PALE)
            axes.text(4.08, y + 0.2, str(support), va="center")
        else:
            axes.text(4.08, y + 0.2, "0", va="center")
    line = 4.0 + 0.36 * total / 2
    axes.plot([line, line], [0.62, 3.08], color=SENT, lw=1.6, ls=(0, (4, 2)))
    axes.text(line, 0.46, "quorum: half of 5", color=SENT, ha="center", va="center")
    save(axes, "vote")


def cache() -> None:
    """Draw what each epoch computes, stores and reads."""
    axes = canvas(6.2, 3.3)
    rows = (
        ("epoch 1", "nothing frozen", ((BLOCKS, TRAINED),)),
        ("epochs 2, 3", "cut 2: compute,\nstore views A, B", ((BLOCKS[:2], FROZEN), (BLOCKS[2:], TRAINED))),
        ("epochs 4, 5", "read A, B", ((("cache",), STORED), (BLOCKS[2:], TRAINED))),
        (
            "epochs 6, 7",
            "cut 3: read old\nrows, store new",
            ((("cache",), STORED), (BLOCKS[2:3], FROZEN), (BLOCKS[3:], TRAINED)),
        ),
        ("epochs 8, ...", "read A, B", ((("cache",), STORED), (BLOCKS[3:], TRAINED))),
    )
    for number, (epoch, told, parts) in enumerate(rows):
        y = 2.75 - number * 0.64
        axes.text(0.1, y + 0.22, epoch, va="center", weight="bold")
        x = 6.1 - sum(0.42 * len(names) if names != ("cache",) else 0.84 for names, _ in parts)
        for names, colour in parts:
            if names == ("cache",):
                box(axes, x, y, 0.8, 0.44, "read", colour)
                x += 0.84
                continue
            for _ in names:
                box(axes, x, y, 0.38, 0.44, "", colour)
                x += 0.42
        axes.text(1.4, y + 0.22, told, va="center", linespacing=1.15)
    save(axes, "cache")


Task = tuple[float, float, str, str]
"""Start, length, text and colour of what a rank does."""
FORWARD, BACKWARD, EXCHANGE, UPDATE = FROZEN, TRAINED, "#b9a3c9", STORED


def timeline(name: str, rows: dict[str, list[Task]], *, legend: dict[str, str]) -> None:
    """Draw what every rank does over time."""
    height = 0.62 * len(rows) + 0.75
    axes = canvas(6.2, height)
    for number, (rank, tasks) in enumerate(rows.items()):
        y = height - 0.62 * (number + 1)
        axes.text(0.05, y + 0.22, rank, va="center")
        for start, length, text, colour in tasks:
            size = 10 if len(text) > 3 and length < 0.6 else 12
            box(axes, 1.1 + start, y, length - 0.03, 0.44, text, colour, fontsize=size)
    arrow(axes, (1.1, 0.6), (6.1, 0.6))
    axes.text(6.1, 0.42, "time", ha="right", va="center")
    x = 0.1
    for text, colour in legend.items():
        box(axes, x, 0.12, 0.2, 0.2, "", colour)
        axes.text(x + 0.28, 0.22, text, va="center")
        x += 0.5 + 0.098 * len(text)
    save(axes, name)


def data_parallel() -> None:
    """Draw a step of two replicas; buckets of gradients are sent during the backward pass."""
    step = [(0.0, 1.0, "forward", FORWARD), (1.0, 2.2, "backward", BACKWARD), (3.9, 0.9, "update", UPDATE)]
    sums = [(1.5, 0.7, "1", EXCHANGE), (2.3, 0.7, "2", EXCHANGE), (3.1, 0.7, "3", EXCHANGE)]
    timeline(
        "data_parallel",
        {"rank 0": step, "exchange": sums, "rank 1": step},
        legend={"a bucket of gradients, averaged": EXCHANGE},
    )


def shared_trunk() -> None:
    """Draw batches that stream through a trunk on three ranks; every rank trains its own heads on each."""
    shades, half = ("#9dc3d4", "#f2b77c", "#c9dfb5"), 0.51
    rows: dict[str, list[Task]] = {}
    for rank in range(3):
        rows[f"rank {rank}"] = [
            task
            for batch, shade in enumerate(shades)
            for task in (
                (2 * half * (batch + rank), half, "trunk", shade),
                (2 * half * (batch + 2) + half, half, "heads", shade),
            )
        ]
    timeline(
        "shared_trunk",
        rows,
        legend={f"batch {number}": shade for number, shade in enumerate(shades, 1)},
    )


def grid() -> None:
    """Draw four micro-batches of one batch on two parts, one forward and one backward pass in turn."""
    orders = ("F1 F2 B1 F3 B2 F4 B3 B4".split(), "F1 B1 F2 B2 F3 B3 F4 B4".split())
    ends: dict[tuple[int, str], float] = {}
    clocks, unit, done = [0.0, 0.0], 0.3, [0, 0]
    rows: tuple[list[Task], list[Task]] = ([], [])
    while min(done) < 8:
        for part, order in enumerate(orders):
            if done[part] == 8:
                continue
            what = order[done[part]]
            needs = (0, what) if part == 1 and what[0] == "F" else (1, what) if part == 0 and what[0] == "B" else None
            if needs and needs not in ends:
                continue
            start = max(clocks[part], ends[needs] if needs else 0.0)
            length = 1.0 if what[0] == "F" else 2.0
            rows[part].append((start * unit, length * unit, what[1], FORWARD if what[0] == "F" else BACKWARD))
            clocks[part] = ends[part, what] = start + length
            done[part] += 1
    for part, row in enumerate(rows):
        row.append((clocks[part] * unit, unit, "", UPDATE))
    timeline(
        "grid",
        dict(zip(("rank 0\nfront part", "rank 1\nback part"), rows)),
        legend={"forward": FORWARD, "backward": BACKWARD, "update": UPDATE},
    )


def local_sgd() -> None:
    """Draw two rounds of two ranks, which compute for unlike times and meet at the ends of rounds."""
    rows: dict[str, list[Task]] = {"rank 0": [], "mean": [], "rank 1": []}
    for number in range(2):
        start = 2.45 * number
        rows["rank 0"] += [(start + 0.55 * step, 0.55, str(3 * number + step + 1), FORWARD) for step in range(3)]
        rows["rank 1"] += [(start + 0.64 * step, 0.64, str(3 * number + step + 1), FORWARD) for step in range(3)]
        rows["mean"].append((start + 1.95, 0.45, "", EXCHANGE))
    timeline("local_sgd", rows, legend={"a step of a rank alone": FORWARD, "mean of the models": EXCHANGE})


def stale_ring() -> None:
    """Draw two steps of a ring of three modules on two ranks; a box says which module computes which batch."""
    unit, start = 0.34, 0.0
    rows: dict[str, list[Task]] = {"rank 0": [], "rank 1": []}
    for batch in range(3, 5):
        for rank, begin, length, module, age in (
            ("rank 0", 0, 1, 1, None),
            ("rank 0", 1, 2, 1, 2),
            ("rank 0", 3, 1, 3, None),
            ("rank 0", 4, 2, 3, 0),
            ("rank 1", 1, 1, 2, None),
            ("rank 1", 2, 2, 2, 1),
        ):
            shown, colour = (batch, FORWARD) if age is None else (batch - age, BACKWARD)
            rows[rank].append((start + begin * unit, length * unit, f"{module}:{shown}", colour))
        for tasks in rows.values():
            tasks.append((start + 6 * unit, 0.8 * unit, "", UPDATE))
        start += 7.3 * unit
    timeline("stale_ring", rows, legend={"module:batch forward": FORWARD, "backward": BACKWARD, "update": UPDATE})


def local_critics() -> None:
    """Draw batches on three ranks with a layer group each; none waits for a later one's backward pass."""
    shades, forward, backward = ("#9dc3d4", "#f2b77c", "#c9dfb5", "#d9c7e3"), 0.36, 0.64
    rows: dict[str, list[Task]] = {}
    for rank in range(3):
        rows[f"rank {rank}"] = [
            task
            for batch, shade in enumerate(shades)
            for start in [rank * forward + batch * (forward + backward)]
            for task in ((start, forward, "F", shade), (start + forward, backward, "B", shade))
        ]
    timeline(
        "local_critics",
        rows,
        legend={f"batch {number}": shade for number, shade in enumerate(shades, 1)},
    )


def subnets() -> None:
    """Draw two rounds of two ranks; other neurons are dealt to each in the second."""
    shades = ((FROZEN, TRAINED), (TRAINED, FROZEN))
    rows: dict[str, list[Task]] = {"rank 0": [], "pieces": [], "rank 1": []}
    for number, colours in enumerate(shades):
        start = 2.45 * number
        rows["pieces"] += [(start, 0.3, "", STORED), (start + 2.1, 0.3, "", EXCHANGE)]
        for rank, colour in enumerate(colours):
            steps = [(start + 0.3 + 0.6 * step, 0.6, str(3 * number + step + 1), colour) for step in range(3)]
            rows[f"rank {rank}"] += steps
    timeline("subnets", rows, legend={"neurons are dealt": STORED, "pieces go back": EXCHANGE})


def step() -> None:
    """Draw the path of one step through a rank."""
    axes = canvas(6.2, 4.3)
    rows = (
        ("batch", "samples and views of this rank and epoch", PALE),
        ("prefix", "read from the cache, or computed", FROZEN),
        ("suffix, loss", "forward pass of the trained blocks", TRAINED),
        ("signal", "all ranks: is any loss not finite? leave?", SENT),
        ("backward", "full buckets of gradients travel at once", TRAINED),
        ("finish", "all ranks know: go on, stop, or leave", SENT),
        ("update", "optimizer step, averaged gradients", STORED),
        ("vote", "all ranks, at an interval's end: same cut", SENT),
    )
    for number, (name, told, colour) in enumerate(rows):
        y = 3.78 - number * 0.52
        box(axes, 0.15, y, 1.25, 0.38, name, colour, color="white" if colour == SENT else INK)
        axes.text(1.6, y + 0.19, told, va="center")
        if number:
            arrow(axes, (0.78, y + 0.52), (0.78, y + 0.38))
    save(axes, "step")


def save(axes: Any, name: str) -> None:
    """Write a figure."""
    FOLDER.mkdir(exist_ok=True)
    axes.figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None}, facecolor="white")
    pyplot.close(axes.figure)


if __name__ == "__main__":
    with pyplot.rc_context(SETTINGS):
        for draw in (
            chain,
            vote,
            cache,
            data_parallel,
            shared_trunk,
            grid,
            local_sgd,
            stale_ring,
            local_critics,
            subnets,
            step,
        ):
            draw()
