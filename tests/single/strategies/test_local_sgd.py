"""What ranks of local SGD show where they are looked at, and go on from."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.comm.point_to_point import Wire
from hvfreeze.comm.world import World
from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.strategies.base import State
from hvfreeze.strategies.local_sgd.strategy import LANES, LocalSgd
from tests.single.ranks_in_threads import on_ranks


def local_sgd(world: World, model: nn.Sequential) -> LocalSgd:
    chain = cut_into_blocks(model)
    replica: Any = SimpleNamespace(
        chain=chain,
        cut=0,
        reducer=SimpleNamespace(carried=chain.named_parameters()),
        state_dict=lambda: State({"optimizer": {}}, {}),
        load_state_dict=lambda state: None,
    )
    return LocalSgd(replica=replica, world=world, wire=Wire(LANES), local_steps=5)


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_ranks_show_one_model_whatever_buffers_it_has_and_go_on_from_their_own() -> None:
    layers = [nn.utils.spectral_norm(nn.Linear(4, 6)), nn.BatchNorm1d(6)]
    whole = nn.Sequential(*layers, nn.InstanceNorm1d(6, track_running_stats=True), nn.Linear(6, 3))
    models = [whole, copy.deepcopy(whole)]
    for rank, model in enumerate(models):
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand(buffer.shape) + rank)
    began = [buffers_of(model) for model in models]

    def look(world: World) -> tuple[str, list[Tensor], State]:
        run = local_sgd(world, models[world.rank])
        digest = run.check(step=2)
        shown = buffers_of(models[world.rank])
        state = run.state_dict()
        run._continue_alone()
        return digest, shown, state

    (first, shown, _), (second, again, state) = on_ranks(2, look)
    assert first == second and same(shown, again) and not same(shown, began[0])
    # A mean of vectors of length 1 has another length.
    spectral = [number for number, (name, _) in enumerate(whole.named_buffers()) if name.startswith("0.")]
    assert spectral and all(torch.equal(shown[number], began[0][number]) for number in spectral)
    assert same(buffers_of(models[1]), began[1])

    def resume(world: World) -> None:
        local_sgd(world, models[0]).load_state_dict(state)

    on_ranks(1, resume)
    assert all(torch.equal(buffers_of(models[0])[number], began[1][number]) for number in spectral)
