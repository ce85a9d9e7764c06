"""Neurons that are dealt out: all of them, each once, and as many bytes as the formula says."""

from __future__ import annotations

import math

import pytest
import torch

from hvfreeze.config.tree import from_dict
from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.model.mlp import Mlp
from hvfreeze.model.model_sources import build_model
from hvfreeze.strategies.subnets.dealing import Table, deal
from hvfreeze.strategies.subnets.strategy import Place, find_mlp


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_deal_is_a_permutation_and_sizes_are_those_of_the_table(size: int) -> None:
    widths = (13, 8)
    table = Table.of(Mlp(5, widths, 3), size=size)
    deals = [deal(widths, size=size, seed=1, number=number) for number in range(3)]
    for dealt in deals:
        for layer, width in enumerate(widths):
            hands = dealt[layer]
            assert sorted(torch.cat(hands).tolist()) == list(range(width))
            assert all(hand.tolist() == sorted(hand.tolist()) for hand in hands)
            assert max(map(len, hands)) - min(map(len, hands)) <= 1
        for p in table.parameters:
            for owner in range(size):
                for rank in range(size):
                    found = tuple(map(len, table.indices(p, dealt, owner=owner, rank=rank)))
                    assert found == table.part_shape(p, owner=owner, rank=rank), (p.name, owner, rank)
        assert [len(dealt[layer][size - 1]) for layer in (0, 1)] == list(table.hand_sizes(size - 1))
    same = deal(widths, size=size, seed=1, number=0)
    assert all(torch.equal(a, b) for mine, theirs in zip(deals[0], same) for a, b in zip(mine, theirs))
    if size > 1:
        assert deals[0][0][0].tolist() != deals[1][0][0].tolist(), "rounds are dealt alike"
        other = deal(widths, size=size, seed=2, number=0)
        assert deals[0][0][0].tolist() != other[0][0].tolist(), "the seed does not count"


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_and_touched_shares_are_the_papers(size: int) -> None:
    """A rank gets 1/n of the first and the last matrix and of the norms, and 1/n^2 of the one between hidden layers."""
    inputs, hidden, classes = 48, 16 * size, 10
    table = Table.of(Mlp(inputs, (hidden, hidden), classes), size=size)
    a_rank = 4 * (inputs * hidden + hidden**2 / size + hidden * classes + 4 * hidden) / size
    for rank in range(size):
        assert sum(table.message_bytes(owner=owner, rank=rank) for owner in range(size)) == a_rank
    # What a rank owns itself does not travel.
    assert table.wire_bytes() == size * a_rank * (size - 1) / size
    touched = table.touched()
    assert touched.pop("hidden2.linear.weight") == 1 / size
    assert set(touched.values()) == {1.0}
    owned = [sum(math.prod(table.own_shape(p, rank)) for p in table.parameters) for rank in range(size)]
    assert sum(owned) == sum(math.prod(p.shape) for p in table.parameters) and len(set(owned)) == 1


def place_in(name: str, **settings: str) -> Place:
    model = build_model(name, num_classes=4, image_size=64, head="mlp-8").model
    chain = cut_into_blocks(model, scheme=settings.get("blocks", "stage"))
    return find_mlp(chain, from_dict({"strategy": "subnets", "model": name, "head": "mlp-8", **settings}), ranks=2)


@pytest.mark.parametrize(
    ("name", "where", "last"),
    [
        ("resnet20", "fc.", None),
        ("mobilenet_v2", "classifier.1.", "Dropout"),
    ],
)
def test_the_mlp_at_the_end_of_a_sequential_is_found(name: str, where: str, last: str | None) -> None:
    place = place_in(name)
    assert place.name == where and place.mlp.widths == (8,)
    assert last is None or type(place.before[-1]).__name__ == last


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mobilenet_v3_small", {}, r"of mobilenet_v3_small, head, .* has classifier\.0\.weight; .*such as resnet18"),
        (
            "resnet20",
            {"blocks": "conv1,layer1,layer2,layer3"},
            r"\(conv1.*has layer3\..*so that the MLP is a block",
        ),
    ],
)
def test_parameters_beside_the_mlp_are_refused_by_name(name: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        place_in(name, **settings)
