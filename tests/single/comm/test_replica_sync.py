"""Tensors that are synchronized between ranks, and the message about a buffer that is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hvfreeze.comm.replica_sync import (
    average_running_statistics,
    broadcast_model,
    check_buffers,
    check_replicas,
    other_buffers,
    running_statistics,
)
from hvfreeze.comm.world import World
from hvfreeze.errors import DivergedError
from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.strategies.model_parallel import block_digests, gather_digests
from tests.single.ranks_in_threads import on_ranks


class Counting(nn.Module):
    """Has a buffer that no norm has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))


def copies() -> list[nn.Sequential]:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)]
    model = nn.Sequential(*layers, nn.InstanceNorm2d(4), Counting(), nn.Flatten(), nn.Linear(4, 2))
    return [model, copy.deepcopy(model)]


def put(model: nn.Module, name: str, value: float) -> None:
    with torch.no_grad():
        model.state_dict(keep_vars=True)[name][0] = value


def test_the_statistics_of_every_norm_that_tracks_them_are_averaged_and_nothing_else() -> None:
    models = copies()
    for rank, model in enumerate(models):
        for name in ("1.running_mean", "2.running_mean", "4.seen"):
            put(model, name, float(rank))
    on_ranks(2, lambda world: average_running_statistics(models[world.rank].modules(), world))
    for rank, model in enumerate(models):
        found = [(mean[0].item(), variance[0].item()) for mean, variance in running_statistics(model.modules())]
        assert found == [(0.5, 1.25), (0.5, 1.25)]
        assert [(name, buffer[0].item()) for name, buffer in other_buffers(model.named_buffers(), model.modules())] == [
            ("4.seen", float(rank))
        ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("4.seen", "buffer 4.seen differs between ranks; only"),
        ("6.weight", "only the optimizer may change parameters"),
    ],
)
def test_what_differs_is_named(name: str, words: str) -> None:
    models = copies()
    put(models[1], name, 7.0)

    def blockwise(world: World) -> None:
        chain = cut_into_blocks(models[world.rank])
        gather_digests(world, chain, block_digests(chain, range(len(chain.blocks))), name="blocks", step=3)

    for check in (blockwise, lambda world: check_replicas(models[world.rank], world, step=3)):
        with pytest.raises(DivergedError, match=r"after step 3.*; ") as refused:
            on_ranks(2, check)
        assert words in str(refused.value)


@pytest.mark.parametrize("held", [True, False])
def test_a_buffer_is_compared_between_ranks_that_hold_it(held: bool) -> None:
    models = copies()
    put(models[1], "4.seen", 7.0)
    if not held:
        models[1][4].get_buffer("seen").data = torch.empty(0)

    def check(world: World) -> None:
        model = models[world.rank]
        check_buffers(model.named_buffers(), model.modules(), world, step=1)

    if held:
        with pytest.raises(DivergedError, match=r"after step 1: buffer 4\.seen differs.*--replicas 1"):
            on_ranks(2, check)
    else:
        on_ranks(2, check)


def test_buffers_that_a_state_dict_omits_are_made_equal() -> None:
    models = copies()
    for rank, model in enumerate(models):
        model.register_buffer("scale", torch.full((2,), float(rank)), persistent=False)
        # It cannot be written to, but is equal.
        model.register_buffer("rows", torch.ones(1).expand(3), persistent=False)
    on_ranks(2, lambda world: broadcast_model(models[world.rank], world))
    assert models[1].get_buffer("scale").tolist() == [0.0, 0.0]
