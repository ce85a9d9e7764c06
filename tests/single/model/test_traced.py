"""Custom models, cut into the blocks that their forward pass runs, by tracing it or by names alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.comm.world import SoloWorld
from hvfreeze.errors import UsageError
from hvfreeze.freezing.freezer import freeze_by_vote
from hvfreeze.model.blocks import Chain
from hvfreeze.model.traced import TracedChain, blocks_of, in_blocks, watch
from tests.single.model.own_models import Text, tokens


def names(chain: Chain) -> list[str]:
    return [block.name for block in chain.blocks]


def test_blocks_stand_in_the_order_of_calls_not_of_definition() -> None:
    chain = blocks_of(Text(), example=tokens())
    assert names(chain) == ["embedding", "encoder.0", "encoder.1", "encoder.2", "head"]
    assert sorted(n for n, _ in chain.named_parameters()) == sorted(n for n, _ in chain.model.named_parameters())
    assert sorted(n for n, _ in chain.named_buffers()) == ["scale"]


def test_a_loose_parameter_belongs_to_the_first_block_whose_output_depends_on_it() -> None:
    chain = blocks_of(Text(), example=tokens())
    homes = {name: block.name for block in chain.blocks for name in block.parameter_names}
    assert homes["position"] == "encoder.0"
    assert homes["temperature"] == "head"


@pytest.mark.parametrize(
    "give", [lambda t: t, tuple, lambda t: {"ids": t[0], "mask": t[1]}], ids=["list", "tuple", "dict"]
)
def test_inputs_may_be_several(give: Callable[[list[Tensor]], Any]) -> None:
    assert len(blocks_of(Text(), example=give(list(tokens()))).blocks) == 5


def test_named_parts_start_blocks_and_what_lies_between_joins_the_block_before() -> None:
    chain = blocks_of(Text(), scheme="encoder.1, head", example=tokens())
    assert names(chain) == ["embedding", "encoder.1", "head"]
    assert [len(block.parameter_names) for block in chain.blocks] == [14, 24, 3]
    assert names(blocks_of(Text(), scheme="embedding,encoder,head", example=tokens())) == [
        "embedding",
        "encoder",
        "head",
    ]


def test_without_an_example_names_stand_in_the_order_of_definition() -> None:
    chain = blocks_of(Text(), scheme="encoder.1,encoder.2")
    assert names(chain) == ["head", "encoder.1", "encoder.2"]
    with pytest.raises(UsageError, match="embedding does not run after the previous name"):
        blocks_of(Text(), scheme="encoder.1,embedding")


def test_watching_leaves_modes_buffers_and_random_state_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 2))
    model[1].eval()
    before, random = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    watch(model, torch.ones(2, 3, 4, 4))
    assert [module.training for module in model] == [True, False, True, True, True]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


class Own(nn.Module):
    """Three layers of its own; `how` says what its forward pass does with them."""

    def __init__(self, how: str = "in order") -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = how
        if how == "tied":
            self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        y = self.first(y) if self.how == "again" else y
        return y if self.how == "unused" else self.third(y)


def test_a_part_that_is_called_again_joins_all_between() -> None:
    assert names(blocks_of(Own(), example=torch.ones(2, 4))) == ["first", "second", "third"]
    assert names(blocks_of(Own("again"), example=torch.ones(2, 4))) == ["first", "third"]


def test_a_module_with_two_names_is_one_module() -> None:
    model, positions = Own(), nn.Module()
    positions.register_buffer("angles", torch.ones(4))
    model.alias, model.first.positions, model.second.positions = model.first, positions, positions
    chain = blocks_of(model, example=torch.ones(2, 4))
    assert names(chain) == ["first", "second", "third"] and chain.blocks[0].buffer_names == ("first.positions.angles",)


def test_what_is_never_called_stays_with_the_last_block() -> None:
    chain = blocks_of(Own("unused"), example=torch.ones(2, 4))
    assert chain.blocks[-1].parameter_names == ("second.weight", "second.bias", "third.weight", "third.bias")


@pytest.mark.parametrize(
    ("model", "scheme", "example", "words"),
    [
        (
            Own("tied"),
            None,
            torch.ones(2, 4),
            "first.weight, also called third.weight, is used by first and third",
        ),
        (Own(), None, None, "give a batch of its inputs as example="),
        (Own(), "fourth", None, "there is no module 'fourth'; name some in forward order: first, second, third"),
        (Own("unused"), "third", torch.ones(2, 4), "third holds no parameter, or the forward pass does not call it"),
        (Own(), "second,first", torch.ones(2, 4), "first does not run after"),
        (Own(), None, torch.ones(2, 3), "example: Own cannot run on it"),
        (Own(), "first", torch.ones(2, 4), "is a single block (first)"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(model: nn.Module, scheme: Any, example: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        blocks_of(model, scheme=scheme, example=example)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).mean((2, 3)))
        return logits


def test_a_container_with_most_of_the_parameters_is_taken_apart() -> None:
    chain = blocks_of(Body(), example=torch.ones(2, 3, 8, 8))
    assert names(chain) == ["body.0", "body.3", "head"]
    assert [type(module) for module in chain.blocks[0].modules] == [nn.Conv2d, nn.BatchNorm2d]
    assert [type(module) for module in chain.blocks[1].modules] == [nn.ReLU, nn.Conv2d, nn.BatchNorm2d]


def test_a_chain_is_taken_as_one_and_any_other_model_is_watched() -> None:
    sequential = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert type(in_blocks(sequential)) is Chain
    assert type(in_blocks(resnet(), blocks="residual")) is Chain
    assert type(in_blocks(Body(), example=torch.ones(2, 3, 8, 8))) is TracedChain
    watched = in_blocks(Own(), blocks="second,third")
    with pytest.raises(UsageError, match="only run inside its own forward pass"):
        watched(torch.ones(2, 4))


def resnet() -> nn.Module:
    from hvfreeze.torchvision_shim import torchvision

    model: nn.Module = torchvision.models.resnet18(num_classes=2)
    return model


def test_freeze_by_vote_takes_an_example_or_names() -> None:
    world = SoloWorld()
    for choice in ({"example": tokens()}, {"blocks": "encoder.1,encoder.2"}):
        model = Text()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        freezer = freeze_by_vote(model, optimizer, world, steps_per_epoch=2, num_epochs=2, **choice)  # type: ignore[arg-type]
        freezer.freeze(1)
        assert not any(p.requires_grad for _, p in freezer.chain.named_parameters(0, 1))
