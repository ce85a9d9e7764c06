"""Models whose forward passes do more than to run their children are cut into blocks, and still give the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain, cut_into_blocks
from hvfreeze.prefix.operations import operations_digest

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Of which each test has its own forward pass."""

    def __init__(self, pass_: Callable[..., Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8, 1, 1), 2.0))
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2 = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU())
        self.relu, self.pool, self.drop = nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(8 * 2 * 2, 16), nn.Linear(16, 5)
        self.pass_ = pass_

    def forward(self, x: Tensor) -> Any:
        return self.pass_(self, x)


def tutorial(net: Net, x: Tensor) -> Tensor:
    """As in many a tutorial: functions between modules, modules that are called in two places."""
    count = x.size(0)
    x = net.pool(net.relu(net.norm1(net.conv1(x)))) * net.scale
    x = net.pool(net.relu(net.conv2(x)))
    x = net.drop(x).reshape(count, -1)
    x = functional.relu(net.fc1(net.drop(x)))
    return net.fc2(functional.dropout(x, 0.5, net.training))  # type: ignore[no-any-return]


def residual(net: Net, x: Tensor) -> Tensor:
    """Shortcuts, operators that work in place, parts of tensors, and a list that is joined."""
    x = functional.relu(net.norm1(net.conv1(x[:, :3] / 2)), inplace=True)
    halves = x.chunk(2, dim=1)
    y = net.conv2(torch.cat([halves[0], halves[0]], dim=1))
    y += torch.cat([halves[1], halves[0]], dim=1)
    y.mul_(2)
    x = torch.cat([y[:, :4], y[:, 4:]], dim=1) * net.scale
    x = functional.adaptive_avg_pool2d(x, (2, 2)).flatten(1)
    return net.fc2(net.fc1(x).relu())  # type: ignore[no-any-return]


def chain_of(pass_: Callable[..., Any], scheme: str = "stage") -> Chain:
    torch.manual_seed(1)
    return cut_into_blocks(Net(pass_), scheme=scheme, example=IMAGES)


@pytest.mark.parametrize("pass_", [tutorial, residual])
def test_blocks_give_what_the_forward_pass_gives_also_while_it_trains(pass_: Callable[..., Any]) -> None:
    chain = chain_of(pass_)
    assert [block.name for block in chain.blocks] == ["conv1", "conv2", "fc1", "fc2"]
    twin, results = copy.deepcopy(chain.model), []
    for model, run in ((chain.model, chain), (twin, twin)):
        for mode in (True, False):
            torch.manual_seed(2)
            logits = run(IMAGES) if model.train(mode) is not None else None
            logits.square().sum().backward()
            results += [logits, *(parameter.grad.clone() for parameter in model.parameters())]
            results += [buffer.clone() for buffer in model.buffers()]
    half = len(results) // 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[:half], results[half:], strict=True))


def test_every_cut_leaves_its_tensor_as_it_is() -> None:
    chain = chain_of(residual)
    for cut in range(1, len(chain.blocks)):
        kept = chain.prefix(cut)(IMAGES)
        before = kept.clone()
        chain.suffix(cut)(kept)
        assert torch.equal(kept, before), cut


def test_images_are_left_as_they_are_where_the_model_changes_them() -> None:
    def changing(net: Net, x: Tensor) -> Tensor:
        x -= 0.5
        x /= 2
        return tutorial(net, x)

    chain, images = chain_of(changing), IMAGES.clone()
    logits = chain.model.eval() and chain(images)
    assert torch.equal(images, IMAGES) and torch.equal(logits, chain.model(images.clone()))


def pieces(net: Net, x: Tensor) -> Tensor:
    """One layer sees 16 pieces of each image."""
    x = net.fc1((net.conv2(net.norm1(net.conv1(x))) * net.scale).reshape(-1, 32))
    return net.fc2(x.reshape(-1, 256)[:, :16])  # type: ignore[no-any-return]


def branches(net: Net, x: Tensor) -> Tensor:
    """Two branches are stacked before the images."""
    x = net.conv2(net.norm1(net.conv1(x))) * net.scale
    x = functional.adaptive_avg_pool2d(x, 2).flatten(1)
    return net.fc2(net.fc1(torch.stack([x, -x])).relu().sum(0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("pass_", [pieces, branches, tutorial])
def test_blocks_end_where_there_is_a_row_for_each_image(pass_: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    chain = cut_into_blocks(Net(pass_), example=IMAGES[:2])
    assert [block.name for block in chain.blocks] == ["conv1", "conv2", "fc1", "fc2"]
    chain.model.eval()
    for images in (IMAGES, IMAGES[:3]):
        for cut in range(1, len(chain.blocks)):
            kept = chain.prefix(cut)(images)
            assert len(kept) == len(images) and torch.equal(chain.suffix(cut)(kept), chain.model(images))


def test_dropouts_rest_with_the_block_that_they_feed() -> None:
    chain = chain_of(tutorial)
    chain.model.train()
    for module in chain.modules(0, 3):
        module.training = False
    features = [chain.prefix(3)(IMAGES) for _ in range(2)]
    assert torch.equal(*features), "what feeds frozen blocks alone drops nothing"
    assert not torch.equal(*(chain.suffix(3)(features[0]) for _ in range(2))), "what feeds the last one does"


def test_a_dropout_in_two_places_of_a_sequence_rests_in_one_of_them() -> None:
    drop, inputs = nn.Dropout(0.5), torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(8, 8), drop, nn.Linear(8, 8), drop, nn.Linear(8, 3))
    chain = cut_into_blocks(model, example=inputs)
    assert [block.name for block in chain.blocks] == ["0", "2", "4"]
    for module in chain.modules(0, 2):
        module.training = False
    features = [chain.prefix(2)(inputs) for _ in range(2)]
    assert torch.equal(*features) and not torch.equal(*(chain.suffix(2)(features[0]) for _ in range(2)))


def test_blocks_can_be_named_and_be_the_finest() -> None:
    assert [block.name for block in chain_of(tutorial, "conv2,fc2").blocks] == ["conv1", "conv2", "fc2"]
    finest = [block.name for block in chain_of(tutorial, "residual").blocks]
    assert finest == ["conv1", "conv2.0", "fc1", "fc2"]


def test_a_model_that_is_one_child_is_read_off_inside() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(tutorial)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + 1  # type: ignore[no-any-return]

    names = [block.name for block in cut_into_blocks(Around(), example=IMAGES).blocks]
    assert names == ["net.conv1", "net.conv2", "net.fc1", "net.fc2"]


def test_the_cache_tells_apart_what_blocks_do_between_their_modules() -> None:
    def of(channels: int, factor: float) -> str:
        def pass_(net: Net, x: Tensor) -> Tensor:
            x = net.conv1(x[:, :channels].repeat(1, 3, 1, 1)[:, :3] * factor)
            return net.fc2(net.fc1(functional.adaptive_avg_pool2d(net.conv2(x), 2).flatten(1)))  # type: ignore[no-any-return]

        model = Net(pass_)
        del model.scale, model.norm1
        return operations_digest(cut_into_blocks(model, example=IMAGES), 1)

    assert of(2, 1.0) == of(2, 1.0)
    assert len({of(2, 1.0), of(1, 1.0), of(2, 0.5)}) == 3


def with_control_flow(net: Net, x: Tensor) -> Tensor:
    return tutorial(net, -x if x.sum() > 0 else x)


def other_while_training(net: Net, x: Tensor) -> Tensor:
    return tutorial(net, 2 * x if net.training else x)


def failing_while_training(net: Net, x: Tensor) -> Tensor:
    return tutorial(net, {False: x}[net.training])


def checking(net: Net, x: Tensor) -> Tensor:
    assert isinstance(x, Tensor)
    return tutorial(net, x)


def beside_logits(net: Net, x: Tensor) -> Any:
    return {"logits": tutorial(net, x), "images": x}


def called_again(net: Net, x: Tensor) -> Tensor:
    return tutorial(net, net.conv1(x)[:, :3])


def left_over(net: Net, x: Tensor) -> Tensor:
    logits = tutorial(net, x)
    net.conv1(x)
    return logits


@pytest.mark.parametrize(
    ("pass_", "words"),
    [
        (with_control_flow, r"model \(Net\): torch.fx cannot trace its forward pass .*Chain.from_modules"),
        (other_while_training, "do not return what the forward pass of Net returns while it trains"),
        (
            failing_while_training,
            r"its forward pass fails while it trains: KeyError: True \(test_forward_steps.py, line",
        ),
        (checking, r"torch.fx cannot trace its forward pass .*Chain.from_modules"),
        (beside_logits, r"model \(Net\): its forward pass returns more than a tensor of logits"),
        (left_over, "calls modules after the logits"),
        (lambda net, x: x.flatten(1)[:, :5], "calls no module"),
        (lambda net, x: net.fc2(net.fc1(x[:, 0, :4].flatten(1))), "scale belongs to no block"),
    ],
)
def test_what_cannot_be_a_chain_is_refused_with_its_reason(pass_: Callable[..., Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        chain_of(pass_)


def test_a_module_in_two_places_is_in_one_block() -> None:
    assert [block.name for block in chain_of(called_again).blocks][:2] == ["conv1", "conv2"]
    with pytest.raises(UsageError, match="used by"):
        chain_of(lambda net, x: tutorial(net, x) + net.fc2(net.fc1(torch.zeros(1, 32))), "conv2,fc1,fc2")
