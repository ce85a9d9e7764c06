"""Memory formats change how weights lie in memory, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.errors import UsageError
from hvfreeze.model.model_sources import build_model, set_memory_formats
from hvfreeze.torchvision_shim import torchvision


def resnet() -> nn.Module:
    return build_model("resnet18", num_classes=10, weights="none", image_size=32).model.train()


def contiguous(model: nn.Module) -> set[str]:
    """Names of the layers whose weights are larger than a pixel and contiguous."""
    return {
        name.removesuffix(".weight")
        for name, parameter in model.named_parameters()
        if parameter.dim() == 4 and parameter.shape[2] > 1 and parameter.is_contiguous()
    }


def test_only_convolutions_to_a_single_pixel_stay_contiguous() -> None:
    small, large = resnet(), resnet()
    set_memory_formats(small, (3, 32, 32))
    set_memory_formats(large, (3, 64, 64))
    assert contiguous(small) == {f"layer4.{block}.conv{number}" for block in (0, 1) for number in (1, 2)}
    assert contiguous(large) == set()


def test_no_value_statistic_mode_or_random_state_changes() -> None:
    model = resnet()
    random = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    set_memory_formats(model, (3, 32, 32))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def transformer() -> nn.Module:
    sizes = {"num_layers": 1, "num_heads": 1, "hidden_dim": 8, "mlp_dim": 8, "num_classes": 4}
    model: nn.Module = torchvision.models.VisionTransformer(image_size=32, patch_size=16, **sizes)
    return model


class Indexed(nn.Module):
    """A forward pass with a mistake in it."""

    def forward(self, x: Tensor) -> Tensor:
        sizes: dict[int, Tensor] = {}
        return sizes[0]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (build_model("mlp-8", num_classes=4, image_size=32).model, "shapes cannot be multiplied"),
        (transformer(), "Wrong image height"),
        (nn.Sequential(nn.Flatten(), nn.Unflatten(1, (32, 32, 3))), "unflatten"),
        (Indexed(), r"KeyError: 0 \(test_memory_formats\.py, line \d+\)"),
        (nn.Sequential(nn.Identity(), nn.Bilinear(2, 2, 2)), "TypeError: .*missing 1 required positional argument"),
        (nn.Sequential(nn.LazyConv2d(4, 3)), "uninitialized parameter"),
    ],
    ids=["RuntimeError", "AssertionError", "own", "KeyError", "TypeError", "lazy"],
)
def test_a_model_that_takes_other_images_is_refused_by_their_shape(model: nn.Module, reason: str) -> None:
    told = rf"model \({type(model).__name__}\) takes no images of 16x32 pixels: .*{reason}.*; pass --image-size"
    with pytest.raises(UsageError, match=told) as refusal:
        set_memory_formats(model, (3, 16, 32))
    assert "another --model" in str(refusal.value) and "\n" not in str(refusal.value)
    assert all(not module._forward_hooks for module in model.modules())


def test_a_view_of_channels_last_is_refused_with_what_to_call() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8 * 6 * 6, 2)

        def forward(self, x: Tensor) -> object:
            return self.fc(self.conv(x).view(x.size(0), -1))

    with pytest.raises(UsageError, match=r"model \(Views\) calls view\(\) on a tensor in channels_last.*flatten\(1\)"):
        set_memory_formats(Views(), (3, 8, 8))
