from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.comm.agreement import TensorLayout
from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.early_exits import EarlyExits
from hvfreeze.model.segments import block_seconds, cut_at, cut_evenly, segment_bytes, work_of
from hvfreeze.strategies.model_parallel import dry_run


def test_the_dearest_segment_is_as_cheap_as_can_be() -> None:
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    for parts in range(1, 8):
        segments = cut_evenly(costs, parts=parts)
        assert [a for a, _ in segments] == [0, *(b for _, b in segments[:-1])] and segments[-1][1] == len(costs)
        assert len(segments) == parts and all(a < b for a, b in segments)
        ways = itertools.combinations(range(1, len(costs)), parts - 1)
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *way, len(costs)])) for way in ways)
        assert max(sum(costs[a:b]) for a, b in segments) == best


def test_given_cuts_are_taken_or_refused() -> None:
    assert cut_at([2, 3], depth=5, parts=3) == ((0, 2), (2, 3), (3, 5))
    for starts in ([3, 2], [0, 1], [1, 5], [2], [1, 2, 3]):
        with pytest.raises(UsageError, match=r"--cut-at .* must be 2 numbers in 1\.\.4, ascending"):
            cut_at(starts, depth=5, parts=3)
    assert cut_at([2, 3], depth=5, parts=3, first=1) == ((1, 2), (2, 3), (3, 5))
    with pytest.raises(UsageError, match=r"in 3\.\.4, above --cut \(2\)"):
        cut_at([2, 3], depth=5, parts=3, first=2)


def test_fewer_given_cuts_are_taken_where_there_may_be_fewer_segments() -> None:
    assert cut_at([2], depth=5, parts=3, fewer=True) == ((0, 2), (2, 5))
    for starts in ([3, 2], [0], [5], [1, 2, 3]):
        with pytest.raises(UsageError, match="must be at most 2 numbers"):
            cut_at(starts, depth=5, parts=3, fewer=True)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 6, 1, 1), (1, 1, 3, 3)])
def test_a_boundary_is_put_together_as_it_was(memory_format: torch.memory_format, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).contiguous(memory_format=memory_format)
    boundary = TensorLayout.of(x)
    sent = boundary.flat(x)
    assert sent.data_ptr() == x.data_ptr() and sent.is_contiguous() and sent.nbytes == boundary.num_bytes
    found = boundary.formed(sent.clone())
    assert torch.equal(found, x) and found.stride() == x.stride()


def test_a_dry_run_says_what_crosses_and_what_blocks_cost() -> None:
    body = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Sequential(nn.Flatten(), nn.Linear(4 * 25, 2))]
    chain = Chain.from_modules(nn.Sequential(*body), [(str(i), part) for i, part in enumerate(body)])
    images = torch.zeros(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    boundaries = dry_run(chain.run, images, depth=3)
    assert [b.shape for b in boundaries] == [(2, 3, 5, 5), (2, 4, 5, 5), (2, 4, 5, 5), (2, 2)]
    assert boundaries[0].strides == images.stride()
    assert all(seconds > 0 for seconds in block_seconds(chain.run, images, depth=3))
    assert segment_bytes(chain, (0, 2)) == 4 * (3 * 4 * 9 + 4) + 4 * 4 * 4 + 8


def test_work_is_two_operations_a_weight_and_place_and_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
    model[0].eval()
    chain = Chain.from_modules(model, [("body", [model[0], model[1]]), ("head", [model[2], model[3]])])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert work_of(chain, torch.randn(2, 3, 8, 8)) == [2 * 2 * 27 * 4 * 36, 2 * 2 * 4 * 36 * 5]
    assert [module.training for module in model] == [False, True, True, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Attending(nn.Module):
    """Attention by PyTorch's function: fused, where it may be."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


ROWS, WIDTH, INNER = 6, 8, 16
PRODUCTS = 2 * (2 * ROWS * ROWS * WIDTH)
"""Operations of queries with keys, and of their results with values."""
OTHERS = 2 * ROWS * WIDTH * (4 * WIDTH + 2 * INNER)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Attending(), PRODUCTS),
        (nn.TransformerEncoderLayer(WIDTH, 2, INNER, batch_first=True), PRODUCTS + OTHERS),
    ],
    ids=["attention", "a layer"],
)
def test_work_of_attention_is_counted_wherever_a_fused_kernel_does_it(layer: nn.Module, expected: int) -> None:
    chain = Chain.from_modules(nn.Sequential(layer), [("body", layer)])
    x, fused = torch.randn(1, ROWS, WIDTH), torch.backends.mha.get_fastpath_enabled()
    assert work_of(chain, x) == [expected]
    assert EarlyExits(chain, ((0, 1),), ()).work(x) == [(expected, 0)]
    assert torch.backends.mha.get_fastpath_enabled() == fused
