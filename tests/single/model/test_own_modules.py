"""Custom modules as chains: cut at their children, by their forward pass, or by hand, compared with the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain, cut_into_blocks
from hvfreeze.torchvision_shim import torchvision


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


@pytest.mark.parametrize("scheme", ["stage", "residual", "2,4"])
def test_an_activation_that_is_there_twice_runs_twice(scheme: str) -> None:
    torch.manual_seed(0)
    relu = nn.ReLU()
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), relu, stage, relu, nn.Linear(4, 2))
    chain, inputs = cut_into_blocks(model, scheme=scheme), torch.randn(16, 4)
    assert torch.equal(chain(inputs), model(inputs))
    assert torch.equal(chain.suffix(1)(chain.prefix(1)(inputs)), model(inputs))


def test_a_layer_that_is_there_twice_is_in_one_block_with_what_runs_between() -> None:
    layer = nn.Linear(4, 4)
    model, inputs = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    chain = cut_into_blocks(model)
    assert [block.name for block in chain.blocks] == ["0", "4"]
    assert torch.equal(chain(inputs), model(inputs))
    with pytest.raises(UsageError, match=r"0\.weight, also called 2\.weight, is used by 0 and 2"):
        cut_into_blocks(nn.Sequential(layer, nn.Linear(4, 4), layer, nn.Linear(4, 2)), scheme="2,3")


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


@pytest.mark.parametrize(("how", "names"), [("swapped", ["second"]), ("more", ["first", "second"])])
def test_a_module_whose_children_are_not_its_forward_pass_is_cut_by_that(how: str, names: list[str]) -> None:
    torch.manual_seed(0)
    model, inputs = Net(how), torch.randn(3, 4)
    chain = cut_into_blocks(model, scheme="second", example=inputs)
    assert [block.name for block in chain.blocks] == names
    assert torch.equal(chain(inputs), model(inputs))


def test_a_subclass_of_a_torchvision_model_is_a_module_of_ones_own() -> None:
    class Doubled(torchvision.models.ResNet):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            doubled: Tensor = 2 * super().forward(x)
            return doubled

    model = Doubled(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
    with pytest.raises(UsageError, match="inputs as example="):
        cut_into_blocks(model)
    images = torch.randn(2, 3, 32, 32)
    chain = cut_into_blocks(model, scheme="layer2,fc", example=images)
    assert [block.name for block in chain.blocks] == ["conv1", "layer2", "fc"]
    assert torch.equal(chain(images), model(images))


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_buffers_that_every_pass_changes_are_no_other_forward_pass(norm: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), norm(nn.Linear(6, 5)), nn.Linear(5, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert [block.name for block in cut_into_blocks(model, example=torch.randn(3, 4)).blocks] == ["0", "1", "2"]
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
    with pytest.raises(UsageError, match=r"scale belongs to no block.*owns="):
        Chain.from_modules(model, parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([("a", "first")], r"second\.weight belongs to no block"),
        ([("a", "first"), ("b", "second"), ("c", "first")], "is used by a and c; join"),
        ([("a", "first"), ("a", "second")], "different names"),
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
    with pytest.raises(UsageError, match=r"first\.weight, also called second\.weight, is used by first and second"):
        cut_into_blocks(model, scheme="second", example=torch.randn(3, 4))
    assert len(cut_into_blocks(model, scheme="first", example=torch.randn(3, 4)).named_parameters()) == 3


class Counting(Net):
    """Keeps a mean that shows in the next pass only, by another tensor or by another content."""

    def __init__(self, replaced: bool) -> None:
        super().__init__()
        self.replaced = replaced
        self.first.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x - self.first.mean)
        if self.training and self.replaced:
            self.first.mean = self.first.mean + 1
        elif self.training:
            self.first.mean += 1  # type: ignore[operator]
        return logits


@pytest.mark.parametrize("replaced", [True, False])
def test_a_buffer_that_only_the_models_own_pass_changes_is_refused_and_stays(replaced: bool) -> None:
    model = Counting(replaced)
    parts = [("first", [lambda x: x - model.first.mean, model.first]), ("second", model.second)]
    before = model.first.mean
    message = r"do not change the buffer first\.mean like the forward pass of Counting while it trains"
    with pytest.raises(UsageError, match=message):
        Chain.from_modules(model, parts, example=torch.randn(3, 4))  # type: ignore[arg-type]
    assert model.first.mean is before and before.item() == 0


def test_a_part_that_the_models_own_pass_does_not_train_is_refused() -> None:
    class Fixed(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.first(x)
            return self.second(x)  # type: ignore[no-any-return]

    with pytest.raises(
        UsageError, match=r"give first\.weight a gradient .* requires_grad=False instead of torch.no_grad"
    ):
        cut_into_blocks(Fixed(), example=torch.randn(3, 4))
    model = Fixed()
    model.first.requires_grad_(False)
    assert len(cut_into_blocks(model, example=torch.randn(3, 4)).blocks) == 2


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda x: x.relu_(), "block b changes its input in place"),
        (lambda x: (x, x), "block b returns a tuple; blocks must return one tensor"),
        (lambda x: x[1:], r"block b returns a tensor of shape \(2, 4\) for 3 samples"),
        (lambda x: x @ x, r"block b cannot run on a tensor of shape \(3, 4\)"),
    ],
)
def test_a_block_that_breaks_the_rules_is_refused_by_name(operation: Any, message: str) -> None:
    model = Net()
    with pytest.raises(UsageError, match=message):
        Chain.from_modules(model, [("a", [model.first, model.second]), ("b", operation)], example=torch.randn(3, 4))
