"""What a head reads: pooled maps, tokens and vectors of every block, or what the last layer takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.errors import UsageError
from hvfreeze.heads.features import (
    MeanWithMirrorImage,
    before_last_layer,
    every_block,
    grid_of,
    pooled,
    token_forms,
)
from hvfreeze.model.blocks import Chain, cut_into_blocks
from hvfreeze.model.early_exits import add_exits
from hvfreeze.model.model_sources import build_model
from hvfreeze.model.modes import in_evaluation
from hvfreeze.torchvision_shim import torchvision


def small_chain() -> Chain:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    deeper = nn.Sequential(nn.Conv2d(4, 6, 3, stride=3, padding=1), nn.ReLU())
    model = nn.Sequential(body, deeper, nn.Flatten(), nn.Linear(6 * 9, 8), nn.Dropout(0.5), nn.Linear(8, 5))
    parts = [("body", body), ("deeper", deeper), ("vector", [model[2], model[3]]), ("head", [model[4], model[5]])]
    return Chain.from_modules(model, parts)


def test_every_blocks_output_is_pooled_to_at_most_so_many_cells_and_put_side_by_side() -> None:
    chain = small_chain()
    chain.model.eval()
    images = torch.randn(2, 3, 8, 8)
    first, second, third = (chain.run(images, 0, stop) for stop in (1, 2, 3))
    expected = [functional.adaptive_avg_pool2d(first, 4).flatten(1), second.flatten(1), third]
    assert second.shape[2:] == (3, 3), "a map below the limit stays as it is"
    assert torch.equal(every_block(chain, pool=4, example=images)(images), torch.cat(expected, 1))
    assert every_block(chain, pool=1, example=images)(images).shape == (2, 4 + 6 + 8)


@pytest.mark.parametrize(("shape", "width"), [((2, 5, 7, 3), 5 * 4 * 3), ((2, 9, 5), 5), ((2, 5), 5)])
def test_maps_need_not_be_square_and_tokens_are_averaged(shape: tuple[int, ...], width: int) -> None:
    output = torch.randn(shape, dtype=torch.bfloat16)
    features = pooled(output, 4)
    assert features.shape == (2, width)
    assert features.dtype == torch.float32
    if output.dim() == 3:
        torch.testing.assert_close(features, output.float().mean(1), atol=0.02, rtol=0)


def test_a_family_whose_maps_end_with_channels_is_pooled_over_its_cells() -> None:
    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": [2, 2]}
    small: Any = torchvision.models.SwinTransformer(**sizes, num_classes=3)
    chain = cut_into_blocks(small.eval())
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        first: Tensor = chain.run(images, 0, 1)
        features = every_block(chain, pool=2, example=images)(images)
    assert first.shape == (1, 8, 8, 8)
    expected = first.permute(0, 3, 1, 2).unflatten(2, (2, 4)).unflatten(4, (2, 4)).mean((3, 5))
    torch.testing.assert_close(features[:, : 8 * 4], expected.flatten(1))


class Turned(nn.Module):
    """A convolution of stride 2 whose maps go in or come out as (B, H, W, C)."""

    def __init__(
        self, channels_in: int, channels: int, *, into: bool = False, out: bool = False, side: int = 0
    ) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels_in, channels, 3, stride=2, padding=1)
        self.into, self.out, self.side = into, out, side

    def forward(self, maps: Tensor) -> Tensor:
        maps = maps.permute(0, 3, 1, 2) if self.into else maps
        if self.side and maps.shape[2] != self.side:
            raise AssertionError(f"images of {self.side} pixels are needed")
        found: Tensor = self.convolution(maps)
        return found.permute(0, 2, 3, 1) if self.out else found


def turned_chain(*blocks: nn.Module) -> Chain:
    model = nn.Sequential(*blocks, nn.Flatten(), nn.LazyLinear(3))
    parts = [(f"block{place}", block) for place, block in enumerate(blocks)]
    return Chain.from_modules(model, [*parts, ("head", [model[-2], model[-1]])])


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (2, 3, 16, 24)])
@pytest.mark.parametrize("channels", [(5, 6), (8, 4)])
def test_maps_are_averaged_over_cells_whichever_side_holds_the_channels(
    shape: tuple[int, ...], channels: tuple[int, int]
) -> None:
    """With 8 and 4 channels of 16 pixels a map's three sides are equal."""
    images, (first, second) = torch.randn(shape), channels
    expected = None
    for lies in ("CC", "LL", "LC", "CL"):
        last = [side == "L" for side in lies]
        torch.manual_seed(0)
        chain = turned_chain(Turned(3, first, out=last[0]), Turned(first, second, into=last[0], out=last[1]))
        features = every_block(chain, pool=2, example=torch.zeros(1, *shape[1:]))(images)
        expected = features if expected is None else expected
        torch.testing.assert_close(features, expected)
        assert features.shape == (2, 4 * (first + second))


class Tokens(nn.Module):
    """Gives the cells of a convolution as tokens: (B, T, C), or (B, C, T)."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 8, 4, stride=4), last

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.convolution(images).flatten(2)
        return tokens if self.last else tokens.transpose(1, 2)


@pytest.mark.parametrize("last", [False, True])
def test_tokens_are_averaged_and_not_their_channels(last: bool) -> None:
    block, images = Tokens(last=last), torch.randn(2, 3, 16, 16)
    features = every_block(turned_chain(block), pool=2, example=torch.zeros(1, 3, 16, 16))(images)
    torch.testing.assert_close(features, block.convolution(images).mean((2, 3)))
    exits = add_exits(turned_chain(block, nn.Identity()), [1], example=torch.zeros(1, 3, 16, 16), classes=3)
    assert exits.critics[0].features.in_features == 8, "channels, not tokens"


@pytest.mark.parametrize("name", ["vit_b_16", "resnet20"])
def test_tokens_are_read_as_class_token_mean_or_grid(name: str) -> None:
    vit: Any = torchvision.models.VisionTransformer
    small = vit(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=3)
    model = small if name == "vit_b_16" else build_model(name, num_classes=3, image_size=32).model
    chain, images = cut_into_blocks(model.eval(), scheme="residual"), torch.randn(2, 3, 32, 32)
    forms = token_forms(chain, example=images)
    assert forms == (("mean", "class", "grid") if name == "vit_b_16" else ())
    for form in forms[1:]:
        with torch.no_grad():
            read = every_block(chain, pool=2, example=images, tokens=form)
            tokens = chain.run(images, 0, 2)
            expected = tokens[:, 0]
            if form == "grid":
                expected = functional.adaptive_avg_pool2d(tokens[:, 1:].mT.reshape(2, 16, 4, 4), 2).flatten(1)
            assert read.part(1, tokens).equal(expected)
            torch.testing.assert_close(read(images)[:, expected.shape[1] : 2 * expected.shape[1]], expected)


def test_patches_are_a_grid_of_the_images_proportions() -> None:
    assert [grid_of(count, (32, 32)) for count in (16, 17, 21)] == [(0, 4, 4), (1, 4, 4), (5, 4, 4)]
    assert grid_of(25, (32, 48)) == (1, 4, 6) and grid_of(24, (48, 32)) == (0, 6, 4) and grid_of(2, (8, 8)) == (1, 1, 1)
    assert grid_of(30, (32, 32)) == (5, 5, 5) and grid_of(60, (32, 32)) is None
    chain = turned_chain(Tokens(last=False))
    images = torch.randn(2, 3, 16, 16)
    assert "class" not in token_forms(chain, example=images)
    with pytest.raises(UsageError, match=r"--tokens \(class\): the \d+ tokens have no class token; use --tokens mean"):
        every_block(chain, pool=2, example=images, tokens="class")(images)


def test_maps_of_which_nothing_tells_where_channels_are_get_refused() -> None:
    for out in (False, True):
        chain = turned_chain(Turned(3, 8, out=out, side=16))
        with pytest.raises(UsageError, match=r"block block0 .* of shape \(1, 8, 8, 8\) with an unknown channel"):
            every_block(chain, pool=2, example=torch.zeros(1, 3, 16, 16))
        clear = turned_chain(Turned(3, 5, out=out, side=16))
        assert every_block(clear, pool=2, example=torch.zeros(1, 3, 16, 16))(torch.randn(1, 3, 16, 16)).shape == (1, 20)


def test_the_last_layer_is_found_behind_containers_and_the_steps_before_it_give_what_it_takes() -> None:
    chain = small_chain()
    nested = nn.Sequential(nn.Flatten(), nn.Sequential(nn.ReLU(), nn.Linear(12, 3)))
    deep = Chain.from_modules(nested, [("head", [*nested])])
    for found, images in ((chain, torch.randn(4, 3, 8, 8)), (deep, torch.randn(4, 3, 2, 2))):
        found.model.eval()
        steps, layer = before_last_layer(found)
        x = found.run(images, 0, len(found.blocks) - 1)
        for step in steps:
            x = step(x)
        assert torch.equal(layer(x), found(images))


def test_what_gives_no_features_is_refused_by_name() -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    chain = Chain.from_modules(nn.Sequential(body), [("head", body)])
    with pytest.raises(UsageError, match="has only one block, its head"):
        every_block(chain, pool=4, example=torch.zeros(1, 3, 8, 8))
    with pytest.raises(UsageError, match=r"pool \(0\) must be at least 1"):
        every_block(small_chain(), pool=0, example=torch.zeros(1, 3, 8, 8))
    squashed = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Softmax(1))
    without_bias = nn.Sequential(nn.Flatten(), nn.Linear(12, 3, bias=False))
    for model in (squashed, without_bias):
        with pytest.raises(UsageError, match="does not end in a linear layer with a bias"):
            before_last_layer(Chain.from_modules(model, [("head", [*model])]))
    with pytest.raises(UsageError, match=r"a block returns a tensor of shape \(1, 2, 3, 4, 5\)"):
        pooled(torch.zeros(1, 2, 3, 4, 5), 4)


def test_an_image_and_its_mirror_image_have_one_mean() -> None:
    chain, images = small_chain(), torch.randn(3, 3, 8, 8)
    read = every_block(chain, pool=2, example=images)
    both = MeanWithMirrorImage(read)
    with torch.no_grad(), in_evaluation(chain.model):
        assert torch.equal(both(images), both(images.flip(3)))
        torch.testing.assert_close(both(images), torch.stack([read(images), read(images.flip(3))]).mean(0))
        assert not torch.equal(both(images), read(images))
