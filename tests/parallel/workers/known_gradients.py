"""Gradients of which every rank knows what all ranks have, and the parameters that they are of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hvfreeze.errors import UsageError
from hvfreeze.ranks.world import World

SHAPES = [(40, 30), (30,), (16, 3, 5, 5), (7,), (20, 20)]


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    named = [(f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype))) for i, shape in enumerate(SHAPES)]
    with torch.no_grad():
        named[2][1].set_(named[2][1].to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    return named


def gradients(rank: int, step: int, *, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) * factor for shape in SHAPES]


def average(world: World, step: int, *, factor: float = 1.0) -> list[Tensor]:
    """Return what the exchange must give, in double precision."""
    all_ranks = [gradients(rank, step, factor=factor, dtype=torch.float64) for rank in range(world.size)]
    return [torch.stack(column).mean(dim=0) for column in zip(*all_ranks, strict=True)]


def backward(named: list[tuple[str, nn.Parameter]], wanted: list[Tensor]) -> None:
    sum((p * g).sum() for (_, p), g in zip(named, wanted, strict=True)).backward()  # type: ignore[union-attr]


def grads(named: list[tuple[str, nn.Parameter]]) -> list[Tensor]:
    return [p.grad for _, p in named if p.grad is not None]


def same_everywhere(world: World, tensors: list[Tensor], name: str) -> None:
    mine = [t.contiguous().view(-1).view(torch.int32).tolist() for t in tensors]
    everybody = world.allgather_object(mine, name=name)
    assert all(theirs == mine for theirs in everybody), "ranks have other bits"


def raises(work: Callable[[], object], words: str) -> None:
    try:
        work()
    except UsageError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nobody said '{words}'")
