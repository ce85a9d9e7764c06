"""A plan of the exchange on one process: what auto may choose, and what a resumed run makes of its first step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hvfreeze.comm.compression_cost import Network
from hvfreeze.comm.world import SoloWorld
from hvfreeze.strategies.compression_choice import CompressionChoice

SLOW = Network(bytes_per_second=1e7, latency_seconds=1e-4)
STEP = {"forward": 0.01, "backward": 0.02, "allreduce": 0.0, "optimizer": 0.001}


class Clock:
    """Seconds by phase that grow by a step whenever they are read."""

    def __init__(self, before: float = 0.0) -> None:
        self.seconds = dict.fromkeys(STEP, before)

    def read(self) -> dict[str, float]:
        return dict(self.seconds)

    def step(self) -> None:
        for phase, seconds in STEP.items():
            self.seconds[phase] += seconds


class Reducer:
    """A reducer of one large matrix that sends nothing."""

    compression, bucket_bytes, uncompressed_steps, steps = "none", 2**25, 10, 0

    def __init__(self) -> None:
        self.carried = [("weight", nn.Parameter(torch.zeros(512, 2304)))]
        self.ready_seconds = {"weight": 0.015}
        self.used: list[str] = []

    def compress(self, compression: str) -> None:
        self.compression = compression
        self.used.append(compression)


class TwoRanks(SoloWorld):
    """This rank and one that is like it, but for the bits that it computes where that is said."""

    size = 2

    def __init__(self, *, alike: bool) -> None:
        super().__init__()
        self.alike = alike

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        if name == "gradients.low-rank.probes" and not self.alike:
            return [value, {key: digest[::-1] for key, digest in value.items()}]
        return [value, value]


@pytest.fixture
def said() -> Iterator[list[str]]:
    yield []


def plan_of(said: list[str], clock: Clock, reducer: Reducer, *, alike: bool = True) -> CompressionChoice:
    kinds: Any = SimpleNamespace(reducer=reducer, clock=clock, world=TwoRanks(alike=alike))
    return CompressionChoice(
        kinds.reducer, kinds.clock, kinds.world, SLOW, asked="auto", accumulate=1, say=lambda line: said.append(line)
    )


def go(plan: CompressionChoice, clock: Clock, reducer: Reducer, steps: int) -> None:
    for _ in range(steps):
        clock.step()
        reducer.steps += 1
        plan.after_step()


@pytest.mark.parametrize("alike", [True, False])
def test_auto_takes_low_rank_only_where_ranks_compute_alike(said: list[str], *, alike: bool) -> None:
    clock, reducer = Clock(), Reducer()
    go(plan_of(said, clock, reducer, alike=alike), clock, reducer, 60)
    assert any(used.startswith("powersgd") for used in reducer.used) is alike
    assert set(reducer.used) <= {"fp16", "powersgd:32", "powersgd:16"}, "lower ranks cost accuracy"
    assert any("powersgd is not used" in line for line in said) is not alike
    assert alike or reducer.compression == "fp16"


@pytest.mark.parametrize("made", [0, 8, 12])
def test_the_seconds_before_a_stop_are_no_part_of_a_step(said: list[str], made: int) -> None:
    clock, reducer = Clock(), Reducer()
    plan = plan_of(said, clock, reducer)
    if made:
        clock.seconds, reducer.steps = dict.fromkeys(STEP, 90.0), made
        plan.load_state_dict(plan.state_dict())
    go(plan, clock, reducer, 20)
    forecast = plan.report()["exchange"]["forecast"]["none"]
    assert forecast["step"] - forecast["exposed"] == pytest.approx(sum(STEP.values()), rel=0.01)
