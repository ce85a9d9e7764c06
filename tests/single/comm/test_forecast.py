"""What a step is expected to take on a network, and which compression that asks for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from hvfreeze.comm.compression_cost import (
    CANDIDATES,
    Network,
    StepForecast,
    Steps,
    batches_that_hide,
    choose,
    forecast,
    last_arrival,
    measure_network,
    own_seconds,
)
from hvfreeze.comm.gradient_exchange import FlatBucket, Message, lay_out, messages_of
from hvfreeze.comm.world import SoloWorld

NETWORK = Network(bytes_per_second=100.0, latency_seconds=0.25)
SHAPES = [(64, 3, 3, 3), (64,), (128, 64, 3, 3), (128,), (300, 200), (7,), (512, 512)]


class TwoRanks(SoloWorld):
    size = 2


def parameters() -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(
    ("messages", "ready", "end"),
    [
        ([(100, 0)], [1.0], 2.25),
        # The second is agreed on while the first travels, the third finds an idle link.
        ([(100, 0), (200, 0), (100, 0)], [0.0, 0.5, 9.0], 10.25),
        ([(100, 0), (200, 0)], [0.0, 0.5], 3.25),
        # What is ready earlier waits for those before it.
        ([(100, 0), (100, 0)], [5.0, 0.0], 7.25),
        # A second sum is agreed on when the first has arrived, or gives way to what waits already.
        ([(100, 50)], [0.0], 2.0),
        ([(100, 50), (100, 0)], [0.0, 0.5], 2.75),
    ],
)
def test_messages_travel_one_after_the_other(messages: list[tuple[int, int]], ready: list[float], end: float) -> None:
    assert last_arrival([Message([], *sizes) for sizes in messages], ready, NETWORK) == pytest.approx(end)


def test_a_step_waits_for_what_the_backward_pass_does_not_hide() -> None:
    steps = Steps(ready={"a": 1.0, "b": 3.0}, backward=4.0, rest=2.0)
    hidden = forecast([Message([0], 100)], ["a", "b"], steps, NETWORK, own_seconds=0.5)
    assert hidden == StepForecast(step=6.5, exposed=0.0)
    shown = forecast([Message([0], 100), Message([1], 100)], ["a", "b"], steps, NETWORK, own_seconds=0.0)
    assert shown == StepForecast(step=6.25, exposed=0.25)


def test_the_smallest_change_that_hides_the_transfer_is_chosen() -> None:
    def steps(**changes: float) -> dict[str, StepForecast]:
        return {name: StepForecast(changes.get(name.replace(":", ""), 2.0), 0.0) for name in CANDIDATES}

    assert choose(steps(none=1.0, fp16=1.0)) == "none"
    assert choose(steps(none=1.04, fp16=1.0)) == "none", "a step that is next to none longer is as good"
    assert choose(steps(fp16=1.0, powersgd4=1.0)) == "fp16"
    assert choose(steps(powersgd16=1.0, powersgd8=1.0, powersgd2=0.99)) == "powersgd:16", "not the highest rank"
    assert choose(steps(powersgd2=1.0)) == "powersgd:2", "none hides, and not the shortest is taken"


def test_the_batches_of_a_step_hide_an_exchange_in_a_tenth_of_its_time() -> None:
    number = batches_that_hide(1.8, 0.1)
    assert 1.8 / (1.8 + number * 0.1) <= 0.1 < 1.8 / (1.8 + (number - 1) * 0.1)


@pytest.mark.parametrize("compression", ["none", "fp16", "powersgd:1", "powersgd:4", "powersgd:32", "auto"])
def test_forecast_bytes_are_those_that_are_laid_out_and_those_of_the_formula(compression: str) -> None:
    named = parameters()
    buckets = lay_out(
        named, range(len(named)), compression=compression, rank=0, size=2, bucket_bytes=2**18, exponents={}
    )
    messages = messages_of(named, compression=compression, size=2, bucket_bytes=2**18)
    assert [list(message.slots) for message in messages] == [list(bucket.slots) for bucket in buckets]
    firsts = [bucket.payload_bytes + bucket.tail_bytes for bucket in buckets]
    assert [message.first_bytes for message in messages] == firsts
    seconds = [bucket.advance(lambda wire, name: [], lambda handle: None) for bucket in buckets]
    assert [message.second_bytes for message in messages] == seconds
    total = sum(message.first_bytes + message.second_bytes for message in messages)
    assert total == by_hand(compression, num_buckets=sum(isinstance(bucket, FlatBucket) for bucket in buckets))


def by_hand(compression: str, *, num_buckets: int) -> int:
    sizes = [(shape[0], math.prod(shape[1:])) for shape in SHAPES]
    if compression == "fp16":
        return sum(2 * n * m for n, m in sizes) + num_buckets * 2 * 2
    rank = int(compression.partition(":")[2] or 0)
    return sum(
        4 * rank * (n + m) if 0 < rank <= min(n, m) and 2 * rank * (n + m) <= n * m and m > 1 else 4 * n * m
        for n, m in sizes
    )


def test_what_compressions_compute_is_tried_and_none_costs_nothing() -> None:
    named = parameters()
    assert own_seconds(named, "none") == 0.0
    assert own_seconds(named[-1:], "powersgd:32") > 0.0
    assert own_seconds(named[1:2], "powersgd:4") == 0.0, "nothing of it is compressed"


def test_the_network_is_measured_in_few_messages() -> None:
    class Counting(TwoRanks):
        sent = 0

        def start_allreduce_(self, tensor: Any, *, name: str) -> None:
            self.sent += tensor.nbytes

    world = Counting()
    network = measure_network(world)
    assert network.bytes_per_second > 0 and network.latency_seconds >= 0
    assert world.sent < 128 * 2**20
    assert Network(10.0, 0.0).line_rate(4) == 8 * 10.0 * 1.5
