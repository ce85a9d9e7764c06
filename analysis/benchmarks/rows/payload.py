"""The gradient bytes that a rank hands to Horovod: the suffix's parameters, four bytes each, and nothing more."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from torch import nn

from analysis.benchmarks.contest import Pace
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import HeldSteps, Setting, replicas_of
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.references import parts_of, resnet

NAME = "allreduce_bytes"
STEPS = 3


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the row of this case. Collective: every rank must call this."""
    setting = Setting(world=ranks.world, scratch=scratch, batch_rows=8)
    parts = parts_of(resnet())
    found: dict[int, float] = {}
    for cut in range(len(parts)):
        steps = HeldSteps(setting.job(NAME, cut=cut))
        for _ in range(STEPS):
            steps.step()
        expected = 4 * STEPS * sum(parameter.numel() for parameter in nn.Sequential(*parts[cut:]).parameters())
        found[cut] = max(given for (given,) in ranks.gather([replicas_of(steps.job).reducer.payload_bytes])) / expected
    yield row_of(found)


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
