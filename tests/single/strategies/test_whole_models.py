"""A model that is put together from what ranks hold of it."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.comm.world import SoloWorld, World
from hvfreeze.model.blocks import Chain
from hvfreeze.model.segments import drop_tensors, tensors_of
from hvfreeze.strategies.model_parallel import SplitStrategy
from hvfreeze.strategies.shared_trunk.strategy import SharedTrunk
from tests.single.ranks_in_threads import on_ranks


class TwoNames(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.norm = self.body[1]
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y


def chain_of(model: TwoNames) -> Chain:
    return Chain.from_modules(model, [("body", model.body), ("head", model.head)])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


def test_a_tensor_of_two_names_is_found_under_both() -> None:
    model = TwoNames()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "norm.running_mean" in expected
    chains = [chain_of(copy.deepcopy(model)) for _ in range(2)]

    def gather(world: World) -> dict[str, Tensor]:
        chain, mine = chains[world.rank], (world.rank, world.rank + 1)
        drop_tensors(chain, 1 - world.rank, 2 - world.rank)
        rank: Any = SimpleNamespace(world=world, chain=chain, _tensors=lambda: tensors_of(chain, mine))
        (whole,) = SplitStrategy.whole_models(rank)
        return whole.state

    first, second = on_ranks(2, gather)
    assert same(first, expected) and second == {}


def test_so_it_is_in_each_model_of_a_shared_trunk() -> None:
    trunk, own = chain_of(TwoNames()), chain_of(TwoNames())
    head: Any = SimpleNamespace(task=SimpleNamespace(name="one"), tensors=lambda: tensors_of(own, (1, 2)))
    facts = SimpleNamespace(whole=False, names=("one",), classes=(("a", "b"),))
    shared: Any = SimpleNamespace(chain=trunk, segment=(0, 1), world=SoloWorld(), facts=facts, heads=[head])
    (model,) = SharedTrunk.whole_models(shared)
    expected = {**trunk.model.state_dict(), "head.weight": own.model.head.weight, "head.bias": own.model.head.bias}
    assert same(model.state, expected)
