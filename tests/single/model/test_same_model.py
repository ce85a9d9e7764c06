"""Every supported model, cut anywhere, is still the same model: outputs, gradients, statistics and random draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.model.blocks import Chain, cut_into_blocks
from hvfreeze.model.families import layout_of
from hvfreeze.model.model_sources import build_model
from hvfreeze.model.weights import head_layers
from hvfreeze.torchvision_shim import torchvision

# Of each family a small member with a small image size; names with a star are smaller still than torchvision's members.
MEMBERS = {
    "convnext*": 32,
    "densenet*": 32,
    "efficientnet*": 32,
    "maxvit*": 32,
    "mlp-24x12": 8,
    "regnet*": 32,
    "resnext*": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "swin*": 32,
    "swin_v2*": 32,
    "vgg*": 32,
    "vit*": 32,
}
SELDOM = {
    "alexnet*": 63,
    "googlenet": 32,
    "inception_v3": 75,
    "mnasnet0_5": 32,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "resnet18": 32,
    "resnet20": 32,
}
BATCH = 4


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    images: Tensor
    schemes: tuple[str, ...]


def small_member(name: str) -> Any:
    zoo = torchvision.models
    swin = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    v2 = {"block": zoo.swin_transformer.SwinTransformerBlockV2, "downsample_layer": zoo.swin_transformer.PatchMergingV2}
    fused, plain, stage = zoo.efficientnet.FusedMBConvConfig, zoo.efficientnet.MBConvConfig, zoo.convnext.CNBlockConfig
    convolutions = [fused(1, 3, 1, 24, 24, 2), fused(4, 3, 2, 24, 48, 2), plain(4, 3, 2, 48, 64, 2)]
    groups = zoo.regnet.BlockParams.from_init_params(depth=4, w_0=16, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25)
    made: dict[str, Callable[[], Any]] = {
        "alexnet*": small_alexnet,
        "convnext*": lambda: zoo.ConvNeXt([stage(8, 12, 2), stage(12, 16, 1), stage(16, None, 1)], 0.2, num_classes=5),
        "densenet*": lambda: zoo.DenseNet(8, (2, 2, 1, 1), 16, num_classes=5),
        "efficientnet*": lambda: zoo.EfficientNet(convolutions, 0.2, last_channel=128, num_classes=5),
        "maxvit*": lambda: zoo.MaxVit((32, 32), 16, 2, [16, 32], [1, 2], 8, 0.2, num_classes=5),
        "regnet*": lambda: zoo.RegNet(groups, num_classes=5),
        "resnext*": lambda: zoo.ResNet(zoo.resnet.Bottleneck, [1, 2, 1, 1], num_classes=5, groups=4, width_per_group=4),
        "swin*": lambda: zoo.SwinTransformer(**swin, num_classes=5),
        "swin_v2*": lambda: zoo.SwinTransformer(**swin, **v2, num_classes=5),
        "vgg*": small_vgg,
        "vit*": lambda: zoo.VisionTransformer(32, 8, 5, 2, 32, 64, dropout=0.1, num_classes=5),
    }
    if name in made:
        return made[name]()
    return build_model(name, num_classes=5, image_size={**MEMBERS, **SELDOM}[name]).model


def small_alexnet() -> nn.Module:
    with torch.device("meta"):
        model: Any = torchvision.models.AlexNet(num_classes=5)
    model.features.to_empty(device="cpu")
    for layer in model.features:
        if isinstance(layer, nn.Conv2d):
            layer.reset_parameters()
    return with_small_classifier(model, ("1", "4", "6"), 256 * 36)


def small_vgg() -> nn.Module:
    with torch.device("meta"):
        model: Any = torchvision.models.VGG(nn.Sequential(), num_classes=5, init_weights=False)
    model.features = torchvision.models.vgg.make_layers([8, "M", 12, "M", 16, 16, "M"], batch_norm=True)
    return with_small_classifier(model, ("0", "3", "6"), 16 * 49)


def with_small_classifier(model: Any, places: tuple[str, str, str], width: int) -> nn.Module:
    for place, size in zip(places, ((width, 64), (64, 64), (64, 5)), strict=True):
        setattr(model.classifier, place, nn.Linear(*size))
    whole: nn.Module = model
    return whole


@pytest.fixture(scope="module", params=[*MEMBERS, *(pytest.param(name, marks=pytest.mark.seldom) for name in SELDOM)])
def subject(request: pytest.FixtureRequest) -> Subject:
    """A model in which no parameter or statistic has a value, such as zero, that would hide a mistake."""
    size = {**MEMBERS, **SELDOM}[request.param]
    torch.manual_seed(7)
    model = small_member(request.param)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
            if tensor.dim() < 2 or tensor.abs().max() < 1e-3:
                tensor.add_(torch.rand_like(tensor), alpha=0.3)
    layout = layout_of(model)
    every_step = ",".join(leaf.name for step in layout.steps for leaf in step.leaves)
    return Subject(model, torch.randn(BATCH, 3, size, size), (*layout.schemes, every_step))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert expected.isfinite().all()
    assert expected.std() > 0
    assert torch.equal(actual, expected)


def test_prefix_then_suffix_is_the_model_bit_for_bit_at_every_cut(subject: Subject) -> None:
    model, images = subject.model.eval(), subject.images
    chain = cut_into_blocks(model)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            expected = model(images)
            for cut in range(len(chain.blocks) + 1):
                boundary = chain.prefix(cut)(images)
                version = boundary._version
                assert boundary.shape[0] == BATCH
                assert_same(chain.suffix(cut)(boundary), expected)
                assert boundary._version == version, "a block changes a boundary tensor in place"


def run_block_by_block(chain: Chain, boundaries: list[tuple[Tensor, int]], x: Tensor) -> Tensor:
    """Note what each block is given, and its version."""
    for index in range(len(chain.blocks)):
        boundaries.append((x, x._version))
        x = chain.run(x, index, index + 1)
    return x


def test_a_training_step_of_the_chain_is_the_models_bit_for_bit_and_changes_no_boundary(subject: Subject) -> None:
    model = subject.model.train()
    before = deepcopy(model.state_dict())

    def step(forward: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], Tensor]:
        model.load_state_dict(before)
        model.zero_grad()
        torch.manual_seed(3)
        logits = forward(subject.images)
        functional.cross_entropy(logits, torch.arange(BATCH) % 5).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return logits.detach(), gradients, buffers, torch.get_rng_state()

    logits, gradients, buffers, random_state = step(model)
    for scheme in subject.schemes:
        boundaries = list[tuple[Tensor, int]]()
        run = partial(run_block_by_block, cut_into_blocks(model, scheme=scheme), boundaries)
        own_logits, own_gradients, own_buffers, own_random_state = step(run)
        assert all(boundary._version == version for boundary, version in boundaries), scheme
        assert_same(own_logits, logits)
        assert len(own_gradients) == len(gradients) == len(list(model.parameters()))
        assert [n for n in gradients if not torch.equal(own_gradients[n], gradients[n])] == []
        assert [n for n in buffers if not torch.equal(own_buffers[n], buffers[n])] == []
        assert torch.equal(own_random_state, random_state)


def test_every_parameter_buffer_and_layer_is_in_exactly_one_block(subject: Subject) -> None:
    model = subject.model
    for scheme in subject.schemes[:-1]:
        chain = cut_into_blocks(model, scheme=scheme)
        first, *_, last = [block.name for block in chain.blocks]
        assert (first, last) in {("conv1" if scheme == "paper" else "stem", "head"), ("hidden1", "head")}
        assert len({block.name for block in chain.blocks}) == len(chain.blocks)
        assert all(block.parameter_names for block in chain.blocks)
        assert model.get_parameter(f"{head_layers(model)[0]}.weight").shape[0] == 5
        assert f"{head_layers(model)[0]}.weight" in chain.blocks[-1].parameter_names
        assert sorted(n for n, _ in chain.named_parameters()) == sorted(n for n, _ in model.named_parameters())
        assert sorted(n for n, _ in chain.named_buffers()) == sorted(n for n, _ in model.named_buffers())
        assert all(parameter is model.get_parameter(n) for n, parameter in chain.named_parameters())
        owned = Counter(id(module) for module in chain.modules())
        assert max(owned.values()) == 1
        assert [n for n, m in model.named_modules() if not list(m.children()) and id(m) not in owned] == []


def test_channels_last_gives_the_models_bits_too() -> None:
    torch.manual_seed(0)
    model: nn.Module = build_model("resnet18", num_classes=5, image_size=32).model.eval()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(BATCH, 3, 32, 32).to(memory_format=torch.channels_last)
    chain = cut_into_blocks(model)
    with torch.no_grad():
        for cut in range(len(chain.blocks)):
            boundary = chain.prefix(cut)(images)
            assert boundary.is_contiguous(memory_format=torch.channels_last)
            assert_same(chain.suffix(cut)(boundary), model(images))
