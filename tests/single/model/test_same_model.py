"""Every supported model, cut anywhere, is still the same model: outputs, gradients, statistics and random draws."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.model.families import layout_of
from hvfreeze.model.model_sources import build_model
from hvfreeze.torchvision_shim import torchvision

# Of each family a small member with a small image size; names with a star are smaller still than torchvision's members.
MEMBERS = {
    "alexnet": 63,
    "convnext_tiny": 32,
    "densenet121": 32,
    "efficientnet_b0": 32,
    "efficientnet_v2*": 32,
    "googlenet": 32,
    "inception_v3": 75,
    "maxvit*": 32,
    "mlp-24x12": 8,
    "mnasnet0_5": 32,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "regnet_y_400mf": 32,
    "resnet20": 32,
    "resnet18": 32,
    "resnext*": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "swin*": 32,
    "swin_v2*": 32,
    "vgg11_bn": 32,
    "vit*": 32,
}
BATCH = 4


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    images: Tensor
    schemes: tuple[str, ...]


def small_member(name: str) -> nn.Module:
    zoo = torchvision.models
    swin = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    v2 = {"block": zoo.swin_transformer.SwinTransformerBlockV2, "downsample_layer": zoo.swin_transformer.PatchMergingV2}
    if name == "swin*":
        return zoo.SwinTransformer(**swin, num_classes=5)  # type: ignore[no-any-return]
    if name == "swin_v2*":
        return zoo.SwinTransformer(**swin, **v2, num_classes=5)  # type: ignore[no-any-return]
    if name == "vit*":
        return zoo.VisionTransformer(32, 8, 5, 2, 32, 64, dropout=0.1, num_classes=5)  # type: ignore[no-any-return]
    if name == "maxvit*":
        return zoo.MaxVit((32, 32), 16, 2, [16, 32], [1, 2], 8, 0.2, num_classes=5)  # type: ignore[no-any-return]
    if name == "efficientnet_v2*":
        fused, plain = zoo.efficientnet.FusedMBConvConfig, zoo.efficientnet.MBConvConfig
        settings = [fused(1, 3, 1, 24, 24, 2), fused(4, 3, 2, 24, 48, 2), plain(4, 3, 2, 48, 64, 2)]
        return zoo.EfficientNet(settings, 0.2, last_channel=128, num_classes=5)  # type: ignore[no-any-return]
    if name == "resnext*":
        bottleneck = zoo.resnet.Bottleneck
        return zoo.ResNet(bottleneck, [1, 2, 1, 1], num_classes=5, groups=4, width_per_group=4)  # type: ignore[no-any-return]
    if name == "alexnet":
        return narrow(zoo.AlexNet(num_classes=5), "1", "4", "6")
    if name == "vgg11_bn":
        return narrow(zoo.vgg11_bn(init_weights=False), "0", "3", "6")
    return build_model(name, num_classes=5, image_size=MEMBERS[name]).model


def narrow(model: Any, first: str, second: str, last: str) -> nn.Module:
    """Return `model` with 64 channels in its classifier, which has most of its parameters."""
    layers: nn.Sequential = model.classifier
    setattr(layers, first, nn.Linear(layers.get_submodule(first).in_features, 64))  # type: ignore[arg-type]
    setattr(layers, second, nn.Linear(64, 64))
    setattr(layers, last, nn.Linear(64, 5))
    whole: nn.Module = model
    return whole


@pytest.fixture(scope="module", params=MEMBERS)
def subject(request: pytest.FixtureRequest) -> Subject:
    """A model in which no parameter or statistic has a value, such as zero, that would hide a mistake."""
    size = MEMBERS[request.param]
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


@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
def test_prefix_then_suffix_is_the_model_bit_for_bit_at_every_cut(subject: Subject, gradients: bool) -> None:
    model, images = subject.model.eval(), subject.images
    chain = cut_into_blocks(model)
    with torch.set_grad_enabled(gradients):
        expected = model(images)
        for cut in range(len(chain.blocks) + 1):
            boundary = chain.prefix(cut)(images)
            assert boundary.shape[0] == BATCH
            assert_same(chain.suffix(cut)(boundary), expected)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_no_block_changes_a_boundary_tensor_in_place(subject: Subject, training: bool) -> None:
    for scheme in subject.schemes:
        chain = cut_into_blocks(subject.model.train(training), scheme=scheme)
        boundaries, versions = [subject.images], [subject.images._version]
        for index in range(len(chain.blocks)):
            boundaries.append(chain.run(boundaries[-1], index, index + 1))
            versions.append(boundaries[-1]._version)
        assert [boundary._version for boundary in boundaries] == versions, scheme


def test_a_training_step_of_the_chain_is_the_models_bit_for_bit(subject: Subject) -> None:
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
        own_logits, own_gradients, own_buffers, own_random_state = step(cut_into_blocks(model, scheme=scheme))
        assert_same(own_logits, logits)
        assert len(own_gradients) == len(gradients) == len(list(model.parameters()))
        assert [n for n in gradients if not torch.equal(own_gradients[n], gradients[n])] == []
        assert [n for n in buffers if not torch.equal(own_buffers[n], buffers[n])] == []
        assert torch.equal(own_random_state, random_state)


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
