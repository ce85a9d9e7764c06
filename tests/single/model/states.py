"""What models are compared by: their tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvfreeze.model.model_sources import build_model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal_states(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def squeezenet(num_classes: int = 10, *, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return build_model("squeezenet1_1", num_classes=num_classes, image_size=32).model
