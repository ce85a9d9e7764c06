from __future__ import annotations

import pytest
import torch
from torch import nn

from hvfreeze.config.head import parse_mlp
from hvfreeze.config.tree import from_dict
from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.model.mlp import Mlp, mlp_of
from hvfreeze.model.model_sources import build_model


def test_widths_are_in_the_name() -> None:
    assert parse_mlp("model", "mlp") == (512, 512) and parse_mlp("model", "mlp-64") == (64,)
    assert parse_mlp("model", "mlp-64x32x16") == (64, 32, 16)
    assert parse_mlp("model", "mlpmixer") is None
    for text in ("mlp-", "mlp-0", "mlp-64x", "mlp-64-32", "mlp-x64", "mlp-6.5"):
        with pytest.raises(UsageError, match=r"--model \(mlp-.*must be mlp, or mlp-WxW"):
            from_dict({"model": text})
    with pytest.raises(UsageError, match=r"--head \(mlp-x\)"):
        from_dict({"head": "mlp-x"})
    with pytest.raises(UsageError, match="last or multi-level with --head-fit exact"):
        from_dict({"head": "mlp", "head_fit": "exact", "augment": "none"})


def test_layers_are_those_of_independent_subnet_training() -> None:
    model = build_model("mlp-64x32", num_classes=10, image_size=8).model
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == {
        "hidden1.linear.weight": (64, 3 * 8 * 8),
        "hidden1.norm.weight": (64,),
        "hidden1.norm.bias": (64,),
        "hidden2.linear.weight": (32, 64),
        "hidden2.norm.weight": (32,),
        "hidden2.norm.bias": (32,),
        "head.linear.weight": (10, 32),
    }
    assert [block.name for block in cut_into_blocks(model).blocks] == ["hidden1", "hidden2", "head"]
    logits = model(torch.randn(100, 3, 8, 8))
    torch.testing.assert_close(logits.mean(0), torch.zeros(10), rtol=0, atol=1e-5)


def test_a_head_takes_the_place_of_the_last_layer() -> None:
    torch.manual_seed(0)
    plain = build_model("resnet20", num_classes=10, image_size=8).model
    torch.manual_seed(0)
    model = build_model("resnet20", num_classes=10, image_size=8, head="mlp-32").model
    found = mlp_of(model)
    assert found is not None and found[0] == "fc"
    assert (found[1].inputs, found[1].widths, found[1].classes) == (64, (32,), 10)
    assert torch.equal(model.get_parameter("conv1.weight"), plain.get_parameter("conv1.weight"))
    chain = cut_into_blocks(model)
    assert chain.blocks[-1].parameter_names[0] == "fc.hidden1.linear.weight"
    chain.verify(torch.randn(3, 3, 8, 8))
    assert mlp_of(plain) is None and isinstance(plain.get_submodule("fc"), nn.Linear)


@pytest.mark.parametrize("name", ["squeezenet1_1", "mlp-8"])
def test_a_head_needs_a_last_linear_layer(name: str) -> None:
    with pytest.raises(UsageError, match=r"--head \(mlp\) replaces a last Linear layer"):
        build_model(name, num_classes=10, image_size=32, head="mlp")


def test_an_mlp_takes_images_of_one_size() -> None:
    model = build_model("mlp-16", num_classes=4, image_size=8).model
    assert isinstance(model, Mlp) and model.inputs == 192
    with pytest.raises(UsageError, match="torchvision has none for mlp-16"):
        build_model("mlp-16", num_classes=4, image_size=8, weights="DEFAULT")
