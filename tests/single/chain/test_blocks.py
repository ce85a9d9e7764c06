"""Every supported model, cut anywhere, is still the same model: outputs, gradients, statistics and random draws."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hvfreeze.chain.blocks import Chain, cut_into_blocks
from hvfreeze.chain.families import layout_of
from hvfreeze.chain.models import build_model, model_names
from hvfreeze.chain.origins.narrow_resnets import NARROW_RESNETS, narrow_resnet
from hvfreeze.chain.origins.weights import head_name
from hvfreeze.errors import UsageError
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
BATCH = 16


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


class ParametersWithoutMemory(TorchFunctionMode):
    """Makes what modules create as parameters on the meta device, so that the largest models take no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        creates = func in {torch.empty, torch.zeros, torch.ones}
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if creates else {})})


@pytest.mark.parametrize("name", model_names())
def test_every_parameter_buffer_and_layer_is_in_exactly_one_block(name: str) -> None:
    extra = {"aux_logits": False, "init_weights": False} if name in {"googlenet", "inception_v3"} else {}
    with ParametersWithoutMemory():
        own = name in NARROW_RESNETS
        model = (
            narrow_resnet(name, num_classes=7) if own else torchvision.models.get_model(name, num_classes=7, **extra)
        )
    for scheme in ["stage", "residual"] + ["paper"] * (type(model).__name__ == "ResNet"):
        chain = cut_into_blocks(model, scheme=scheme)
        assert len({block.name for block in chain.blocks}) == len(chain.blocks) >= 5
        assert [chain.blocks[0].name, chain.blocks[-1].name] == ["conv1" if scheme == "paper" else "stem", "head"]
        assert all(block.parameter_names for block in chain.blocks)
        assert model.get_parameter(f"{head_name(model)}.weight").shape[0] == 7
        assert f"{head_name(model)}.weight" in chain.blocks[-1].parameter_names
        assert sorted(n for n, _ in chain.named_parameters()) == sorted(n for n, _ in model.named_parameters())
        assert sorted(n for n, _ in chain.named_buffers()) == sorted(n for n, _ in model.named_buffers())
        assert all(parameter is model.get_parameter(n) for n, parameter in chain.named_parameters())
        owned = Counter(id(module) for module in chain.modules())
        assert max(owned.values()) == 1
        assert [n for n, m in model.named_modules() if not list(m.children()) and id(m) not in owned] == []


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
        ("conv1,maxpool,layer1.0", "conv1 maxpool layer1.0"),
        ("layer4", "conv1 layer4"),
    ],
)
def test_resnet18_is_cut_into_these_blocks(scheme: str, names: str) -> None:
    chain = cut_into_blocks(resnet18(), scheme=scheme, example=torch.randn(2, 3, 32, 32))
    assert [block.name for block in chain.blocks] == names.split()


def test_stage_blocks_run_torchvisions_own_stages() -> None:
    model = resnet18()
    stages = [model.get_submodule(f"layer{i}") for i in (1, 2, 3, 4)]
    assert [block.steps for block in cut_into_blocks(model).blocks[1:5]] == [(stage,) for stage in stages]
    assert all(stage in cut_into_blocks(model).modules(1, 5) for stage in stages)
    assert not any(stage in cut_into_blocks(model, scheme="residual").modules() for stage in stages)


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
        ("stages", "there is no module 'stages'; give stage, residual, paper, or names"),
        ("layer2,layer5", "there is no module 'layer5'"),
        ("layer2,,layer3", "there is no module ''"),
        ("relu", "relu runs inside bn1, which is not divided"),
        ("layer1.0.conv1", "layer1.0.conv1 runs inside layer1.0, which is not divided"),
        ("layer2,layer1", "layer1 does not run after layer2"),
        ("layer2,layer2.0", "layer2.0 does not run after layer2"),
    ],
)
def test_a_list_of_names_that_cannot_start_blocks_is_refused_by_name(scheme: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("'", ".")):
        cut_into_blocks(resnet18(), scheme=scheme)


def test_paper_is_a_scheme_of_resnets_only() -> None:
    with pytest.raises(UsageError, match="give stage, residual, or names"):
        cut_into_blocks(torchvision.models.squeezenet1_1(), scheme="paper")


def test_auxiliary_heads_are_refused() -> None:
    with pytest.raises(UsageError, match=r"aux1, aux2.*aux_logits=False"):
        cut_into_blocks(torchvision.models.GoogLeNet(init_weights=False))


def test_the_rescaling_of_inputs_is_part_of_the_first_block() -> None:
    model = torchvision.models.GoogLeNet(aux_logits=False, transform_input=True, init_weights=False)
    images = torch.randn(BATCH, 3, 32, 32)
    assert not torch.equal(model.conv1.eval()(images), model.conv1(model._transform_input(images)))
    assert torch.equal(
        cut_into_blocks(model, scheme="maxpool1").prefix(1)(images), model.conv1(model._transform_input(images))
    )


def test_dropout_belongs_to_the_block_of_the_layer_that_it_feeds() -> None:
    with ParametersWithoutMemory():
        model = torchvision.models.vgg11()
    chain = cut_into_blocks(model)
    for block in chain.blocks[-2:]:
        assert [type(step).__name__ for step in block.steps][:2] == ["Dropout", "Linear"]


@pytest.mark.parametrize("bounds", [(-1, 2), (0, 7), (7, 7)])
def test_a_cut_outside_the_chain_is_refused(bounds: tuple[int, int]) -> None:
    chain = cut_into_blocks(resnet18())
    with pytest.raises(UsageError, match=r"must lie in 0\.\.6"):
        chain.run(torch.zeros(2, 3, 32, 32), *bounds)
    with pytest.raises(UsageError, match=r"must lie in 0\.\.6"):
        chain.named_parameters(*bounds)


def sequential() -> nn.Sequential:
    convolutions = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    stage = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    return nn.Sequential(*convolutions, stage, nn.Flatten(), nn.Dropout(), nn.Linear(36, 5))


@pytest.mark.parametrize(
    ("scheme", "names", "sizes"),
    [
        ("stage", ["0", "4", "7"], [4, 2, 2]),
        ("residual", ["0", "4.0", "4.1", "7"], [4, 1, 2, 2]),
        ("4.1,7", ["0", "4.1", "7"], [5, 3, 1]),
    ],
)
def test_an_nn_sequential_is_cut_at_its_children(scheme: str, names: list[str], sizes: list[int]) -> None:
    chain = cut_into_blocks(sequential(), scheme=scheme, example=torch.randn(2, 3, 8, 8))
    assert [block.name for block in chain.blocks] == names
    assert [len(block.steps) for block in chain.blocks] == sizes
    assert [len(block.steps) for block in cut_into_blocks(chain.model, scheme=scheme).blocks] == sizes


class Net(nn.Module):
    """Two children, run in the order in which they were defined unless `how` says otherwise."""

    def __init__(self, how: str = "in order") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "swapped":
            return self.first(self.second(x))
        y = self.second(self.first(x))
        return (y, y) if self.how == "pair" else y.relu() if self.how == "more" else y


@pytest.mark.parametrize("scheme", ["stage", "second", "first,second"])
def test_a_module_of_ones_own_is_cut_at_its_children(scheme: str) -> None:
    model, inputs = Net(), torch.randn(3, 4)
    chain = cut_into_blocks(model, scheme=scheme, example=inputs)
    assert [block.name for block in chain.blocks] == ["first", "second"]
    assert torch.equal(chain.suffix(1)(chain.prefix(1)(inputs)), model(inputs))


@pytest.mark.parametrize("how", ["swapped", "pair", "more"])
def test_a_module_whose_children_are_not_its_forward_pass_is_refused(how: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(UsageError, match=r"forward pass of Net.*Chain\.from_modules"):
        cut_into_blocks(Net(how), scheme="second", example=torch.randn(3, 4))


def test_a_dropout_that_stands_elsewhere_than_it_was_defined_is_noticed() -> None:
    class Dropping(Net):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.dropout(self.first(x)))
            return y

    model, random = Dropping(), torch.get_rng_state()
    with pytest.raises(UsageError, match="order in which they were defined"):
        cut_into_blocks(model, example=torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert model.training and torch.equal(torch.get_rng_state(), random)


def test_a_module_of_ones_own_needs_an_example() -> None:
    with pytest.raises(UsageError, match="pass example="):
        cut_into_blocks(Net(), scheme="second")


def test_a_subclass_of_a_torchvision_model_is_a_module_of_ones_own() -> None:
    class Doubled(torchvision.models.ResNet):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            doubled: Tensor = 2 * super().forward(x)
            return doubled

    model = Doubled(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
    with pytest.raises(UsageError, match="pass example="):
        cut_into_blocks(model)
    with pytest.raises(UsageError, match=r"block fc cannot run"):
        cut_into_blocks(model, scheme="layer2,fc", example=torch.randn(2, 3, 32, 32))


def test_the_comparison_leaves_modes_and_statistics_alone() -> None:
    model = sequential().train()
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cut_into_blocks(model, example=torch.ones(2, 3, 8, 8))
    assert [module.training for module in model] == [True, False, *[True] * 6]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_chain_can_be_written_out_with_functions_and_loose_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 3)
            self.conv = nn.Conv2d(3, 3, 1)
            self.scale = nn.Parameter(torch.full((1,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(torch.flatten(self.conv(x) * self.scale, 1))
            return y

    model, inputs = Scaled(), torch.randn(2, 3, 2, 2)
    parts: Any = [("a", [model.conv, lambda x: x * model.scale]), ("b", [lambda x: torch.flatten(x, 1), model.fc])]
    chain = Chain.from_modules(model, parts, owns={"a": ["scale"]}, example=inputs)
    assert [n for n, _ in chain.named_parameters()] == ["scale", "conv.weight", "conv.bias", "fc.weight", "fc.bias"]
    assert chain.modules(0, 1) == [model.conv]
    assert torch.equal(chain(inputs), model(inputs))
    with pytest.raises(UsageError, match=r"scale belongs to none of them.*owns="):
        Chain.from_modules(model, parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([("a", "first")], r"second\.weight belongs to none"),
        ([("a", "first"), ("b", "second"), ("c", "first")], "is used by a and c; join"),
        ([("a", "first"), ("a", "second")], "no name twice"),
        ([], "at least one"),
    ],
)
def test_blocks_that_do_not_share_out_the_model_are_refused(parts: list[tuple[str, str]], message: str) -> None:
    model = Net()
    with pytest.raises(UsageError, match=message):
        Chain.from_modules(model, [(name, model.get_submodule(child)) for name, child in parts])


def test_a_module_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="block b: one of its modules is not a submodule of Net"):
        Chain.from_modules(Net(), [("b", nn.Linear(4, 4))])


def test_a_parameter_shared_by_two_blocks_is_refused() -> None:
    model = Net()
    model.second.weight = model.first.weight
    with pytest.raises(UsageError, match=r"second\.weight is used by first and second"):
        cut_into_blocks(model, scheme="second", example=torch.randn(3, 4))
    assert len(cut_into_blocks(model, scheme="first", example=torch.randn(3, 4)).named_parameters()) == 3


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda x: x.relu_(), "block b changes its input in place"),
        (lambda x: (x, x), "block b gives a tuple; the boundary of a block is one tensor"),
        (lambda x: x @ x, r"block b cannot run on a tensor of shape \(3, 4\)"),
    ],
)
def test_a_block_that_breaks_the_rules_is_refused_by_name(operation: Any, message: str) -> None:
    model = Net()
    with pytest.raises(UsageError, match=message):
        Chain.from_modules(model, [("a", [model.first, model.second]), ("b", operation)], example=torch.randn(3, 4))
