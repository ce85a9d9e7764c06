"""Which blocks a torchvision model is cut into, and what each owns."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.torchvision_shim import torchvision

BATCH = 4


@cache
def resnet18() -> nn.Module:
    model: nn.Module = torchvision.models.resnet18(num_classes=5)
    return model


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        ("stage", "stem layer1 layer2 layer3 layer4 head"),
        ("residual", "stem layer1.0 layer1.1 layer2.0 layer2.1 layer3.0 layer3.1 layer4.0 layer4.1 head"),
        ("paper", "conv1 bn1 layer1 layer2 layer3 layer4 head"),
        ("layer2,layer3.1, fc", "conv1 layer2 layer3.1 fc"),
        ("layer4", "conv1 layer4"),
    ],
)
def test_resnet18_is_cut_into_these_blocks(scheme: str, names: str) -> None:
    chain = cut_into_blocks(resnet18(), scheme=scheme, example=torch.randn(2, 3, 32, 32))
    assert [block.name for block in chain.blocks] == names.split()


def test_a_range_of_blocks_has_their_parameters_buffers_and_modules_under_the_models_names() -> None:
    model = resnet18()
    chain = cut_into_blocks(model)
    inside = ("conv1.", "bn1.", "layer1.")
    assert [n for n, _ in chain.named_parameters(0, 2)] == [
        n for n in dict(model.named_parameters()) if n.startswith(inside)
    ]
    assert [n for n, _ in chain.named_buffers(0, 2)] == [n for n in dict(model.named_buffers()) if n.startswith(inside)]
    assert [n for n, _ in chain.named_parameters(5)] == ["fc.weight", "fc.bias"]
    norms = [m for m in chain.modules(0, 2) if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 5
    assert chain.named_parameters(2, 2) == []


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("stages", "there is no module 'stages'; use stage, residual, paper, or names"),
        ("layer2,layer5", "there is no module 'layer5'"),
        ("relu", "relu is inside bn1, which cannot be divided"),
        ("layer1.0.conv1", "layer1.0.conv1 is inside layer1.0, which cannot be divided"),
        ("layer2,layer1", "layer1 does not run after layer2"),
        ("layer2,layer2.0", "layer2.0 does not run after layer2"),
    ],
)
def test_a_list_of_names_that_cannot_start_blocks_is_refused_by_name(scheme: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("'", ".")):
        cut_into_blocks(resnet18(), scheme=scheme)


def test_paper_is_a_scheme_of_resnets_only() -> None:
    with pytest.raises(UsageError, match="use stage, residual, or names"):
        cut_into_blocks(torchvision.models.squeezenet1_1(), scheme="paper")


def test_auxiliary_heads_are_refused() -> None:
    with pytest.raises(UsageError, match=r"aux1, aux2.*aux_logits=False"):
        cut_into_blocks(torchvision.models.GoogLeNet(init_weights=False))


def test_the_rescaling_of_inputs_is_part_of_the_first_block() -> None:
    model: Any = torchvision.models.GoogLeNet(aux_logits=False, transform_input=True, init_weights=False)
    images = torch.randn(BATCH, 3, 32, 32)
    assert not torch.equal(model.conv1.eval()(images), model.conv1(model._transform_input(images)))
    assert torch.equal(
        cut_into_blocks(model, scheme="maxpool1").prefix(1)(images), model.conv1(model._transform_input(images))
    )


def test_dropout_belongs_to_the_block_of_the_layer_that_it_feeds() -> None:
    with torch.device("meta"):
        model = torchvision.models.vgg11()
    chain = cut_into_blocks(model)
    for block in chain.blocks[-2:]:
        assert [type(step).__name__ for step in block.steps][:2] == ["Dropout", "Linear"]


@pytest.mark.parametrize("bounds", [(-1, 2), (0, 7)])
def test_a_cut_outside_the_chain_is_refused(bounds: tuple[int, int]) -> None:
    chain = cut_into_blocks(resnet18())
    with pytest.raises(UsageError, match=r"must be in 0\.\.6"):
        chain.run(torch.zeros(2, 3, 32, 32), *bounds)
    with pytest.raises(UsageError, match=r"must be in 0\.\.6"):
        chain.named_parameters(*bounds)
