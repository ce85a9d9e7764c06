"""What a head reads: pooled maps, tokens and vectors of every block, or what the last layer takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.chain.blocks import Chain, cut_into_blocks
from hvfreeze.chain.models import build_model
from hvfreeze.errors import UsageError
from hvfreeze.heads.features import EveryBlock, before_last_layer, pooled


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
    assert torch.equal(EveryBlock(chain, pool=4)(images), torch.cat(expected, 1))
    assert EveryBlock(chain, pool=1)(images).shape == (2, 4 + 6 + 8)


@pytest.mark.parametrize(("shape", "width"), [((2, 5, 7, 3), 5 * 4 * 3), ((2, 9, 5), 5), ((2, 5), 5)])
def test_maps_need_not_be_square_and_tokens_are_averaged(shape: tuple[int, ...], width: int) -> None:
    output = torch.randn(shape, dtype=torch.bfloat16)
    features = pooled(output, 4)
    assert features.shape == (2, width)
    assert features.dtype == torch.float32
    if output.dim() == 3:
        torch.testing.assert_close(features, output.float().mean(1), atol=0.02, rtol=0)


def test_a_family_whose_maps_end_with_channels_is_pooled_over_its_cells() -> None:
    chain = cut_into_blocks(build_model("swin_t", num_classes=3, image_size=32).model.eval())
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        first: Tensor = chain.run(images, 0, 1)
        features = EveryBlock(chain, pool=2)(images)
    assert first.shape == (1, 8, 8, 96)
    expected = first.permute(0, 3, 1, 2).unflatten(2, (2, 4)).unflatten(4, (2, 4)).mean((3, 5))
    torch.testing.assert_close(features[:, : 96 * 4], expected.flatten(1))


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
    with pytest.raises(UsageError, match="has one block only, its head"):
        EveryBlock(chain, pool=4)
    with pytest.raises(UsageError, match=r"pool \(0\) must be at least 1"):
        EveryBlock(small_chain(), pool=0)
    squashed = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Softmax(1))
    without_bias = nn.Sequential(nn.Flatten(), nn.Linear(12, 3, bias=False))
    for model in (squashed, without_bias):
        with pytest.raises(UsageError, match="does not end in a linear layer with a bias"):
            before_last_layer(Chain.from_modules(model, [("head", [*model])]))
    with pytest.raises(UsageError, match=r"a block gives a tensor of shape \(1, 2, 3, 4, 5\)"):
        pooled(torch.zeros(1, 2, 3, 4, 5), 4)
