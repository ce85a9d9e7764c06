"""An exchange: the bytes that a rank hands to Horovod, and what compressing them costs where the network is free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from torch import nn

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import HeldSteps, Setting, replicas_of
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.references import parts_of, resnet

NAME = "allreduce_bytes"
STEPS = 3
COMPRESSIONS = {
    "compression_fp16": "fp16",
    "compression_powersgd4": "powersgd:4",
    "compression_powersgd16": "powersgd:16",
}
AT_64 = {"compression_powersgd4_64px": "powersgd:4"}
"""The same parameters in steps four times as long."""


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    if NAME in wanted:
        yield bytes_handed_over(ranks, scratch)
    for rows, side in ((COMPRESSIONS, 32), (AT_64, 64)):
        chosen = {name: compression for name, compression in rows.items() if name in wanted}
        if chosen:
            setting = Setting.of(ranks, scratch, pace, side=side)
            yield from compressed(ranks, chosen, setting, pace)


def bytes_handed_over(ranks: Ranks, scratch: Path) -> Row:
    """Return the row of the suffix's parameters, four bytes each, and nothing more. Collective."""
    setting = Setting(world=ranks.world, scratch=scratch, batch_rows=8)
    parts = parts_of(resnet())
    found: dict[int, float] = {}
    for cut in range(len(parts)):
        steps = HeldSteps(setting.job(NAME, cut=cut))
        for _ in range(STEPS):
            steps.step()
        expected = 4 * STEPS * sum(parameter.numel() for parameter in nn.Sequential(*parts[cut:]).parameters())
        found[cut] = max(given for (given,) in ranks.gather([replicas_of(steps.job).reducer.payload_bytes])) / expected
    return row_of(found)


def row_of(found: dict[int, float]) -> Row:
    """Return the row for bytes over expected bytes by cut: the ratio that is furthest from 1."""
    worst = max(found.values(), key=lambda ratio: abs(ratio - 1))
    return Row(
        name=NAME,
        ratio=worst,
        bound=1.0,
        ok=worst == 1,
        n=len(found),
        low=worst,
        high=worst,
        what=f"bytes handed to Horovod in {STEPS} steps over suffix parameters x 4 x steps, cuts 0 to {max(found)}; "
        "exactly 1 is asked for",
    )


def compressed(ranks: Ranks, compressions: Mapping[str, str], setting: Setting, pace: Pace) -> Iterator[Row]:
    """Yield a row for each compression: our step with it over that without. Collective."""
    duels = [
        Duel(
            name=name,
            ours=name,
            reference="none",
            bound=1.03,
            what=f"training step of a ResNet-18, {setting.side} px, nothing frozen, with --compression {compression}, "
            "against without, through the memory of one machine",
            alike=False,
        )
        for name, compression in compressions.items()
    ]
    sides = [side(setting, name, compression) for name, compression in {"none": "none", **compressions}.items()]
    yield from hold(ranks, sides, duels, pace=pace)


def side(setting: Setting, name: str, compression: str) -> Side:
    """Return a side that compresses from its first step on."""
    job = setting.job(name, compression=compression)
    replicas_of(job).reducer.uncompressed_steps = 0
    return Side(name, HeldSteps(job).step)
