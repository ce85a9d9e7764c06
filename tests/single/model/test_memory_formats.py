"""Memory formats change how weights lie in memory, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.model_sources import BuiltModel, build_model, set_memory_formats
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
    set_memory_formats(BuiltModel(small, []), (3, 32, 32))
    set_memory_formats(BuiltModel(large, []), (3, 64, 64))
    assert contiguous(small) == {f"layer4.{block}.conv{number}" for block in (0, 1) for number in (1, 2)}
    assert contiguous(large) == set()


def test_no_value_statistic_mode_or_random_state_changes() -> None:
    model = resnet()
    random = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    set_memory_formats(BuiltModel(model, []), (3, 32, 32))
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


class Asserts(nn.Module):
    """A forward pass that says nothing of what it asks for."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] != x.shape[3]:
            raise AssertionError
        return x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (build_model("mlp-8", num_classes=4, image_size=32).model, "shapes cannot be multiplied"),
        (transformer(), "Wrong image height"),
        (nn.Sequential(nn.Flatten(), nn.Unflatten(1, (32, 32, 3))), "unflatten"),
        (Indexed(), r"KeyError: 0 \(test_memory_formats\.py, line \d+\)"),
        (Asserts(), r"AssertionError:  \(test_memory_formats\.py, line \d+\)"),
        (nn.Sequential(nn.Identity(), nn.Bilinear(2, 2, 2)), "TypeError: .*missing 1 required positional argument"),
        (nn.Sequential(nn.LazyConv2d(4, 3)), "uninitialized parameter"),
    ],
    ids=["RuntimeError", "AssertionError", "own", "KeyError", "without words", "TypeError", "lazy"],
)
def test_a_model_that_takes_other_images_is_refused_by_their_shape(model: nn.Module, reason: str) -> None:
    told = rf"model \({type(model).__name__}\) fails on images of 16x32 pixels: .*{reason}.*; use --image-size"
    with pytest.raises(UsageError, match=told) as refusal:
        set_memory_formats(BuiltModel(model, []), (3, 16, 32))
    assert "another --model" in str(refusal.value) and "\n" not in str(refusal.value)
    assert not model._forward_pre_hooks and all(not module._forward_hooks for module in model.modules())


class Views(nn.Module):
    """As in many a tutorial; all that it views at once are `by`, sides of (B, C, H, W)."""

    def __init__(self, by: int = 1) -> None:
        super().__init__()
        self.by = by
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 6 * 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        count = x.size(0)
        x = functional.relu(self.norm(self.conv(x)))
        x = x.view(count * 8, -1) if self.by == 2 else x.view(-1, 8 * 6 * 6)
        return self.fc(x.reshape(count, -1))  # type: ignore[no-any-return]


def flat(x: Tensor) -> Tensor:
    return x.view(x.size(0), -1)


@pytest.mark.parametrize("kind", ["rows", "channels", "written out"])
def test_a_view_that_channels_last_does_not_allow_has_contiguous_images_and_weights(kind: str) -> None:
    model = Views(by=2 if kind == "channels" else 1)
    parts = [("conv", [model.conv, model.norm, functional.relu]), ("head", [flat, model.fc])]
    chain = Chain.from_modules(model, parts) if kind == "written out" else None  # type: ignore[arg-type]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    built = set_memory_formats(BuiltModel(model, ["first"], chain), (3, 8, 8))
    assert built.contiguous and model.conv.weight.is_contiguous()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    first, note = built.notes
    assert first == "first" and note.startswith(
        "model (Views): images and weights are contiguous, because it fails in channels_last"
    )
    assert note.endswith("Use .reshape(...) instead.")
    blocks = built.in_blocks(scheme="stage", example=torch.rand(2, 3, 8, 8))
    images = torch.rand(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    for mode in (True, False):
        model.train(mode)
        expected = model(images)
        for cut in range(len(blocks.blocks)):
            assert torch.equal(blocks.suffix(cut)(blocks.prefix(cut)(images)), expected)
        blocks(images).sum().backward()
