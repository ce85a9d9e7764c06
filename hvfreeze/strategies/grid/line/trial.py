"""A trial of a training step, block by block, before the first: what crosses between blocks, and what each costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.segments import Boundary, RunBlocks
from hvfreeze.errors import UsageError

TIMES = 3


@dataclass(frozen=True)
class Trial:
    """What was found for images of one shape."""

    boundaries: tuple[Boundary, ...]
    """Before block 0 to behind the last."""
    seconds: tuple[float, ...]
    """Of each block, forward and backward, the least of several times."""


def try_blocks(chain: Chain, run: RunBlocks, images: Tensor, *, times: int = TIMES) -> Trial:
    """Return what a training step with `images`, (B, C, H, W), is like; parameters, buffers and random state stay.

    Raises:
        UsageError: a block cannot train on so few images.
    """
    blocks = len(chain.blocks)
    least, boundaries = [math.inf] * blocks, [Boundary.of(images)]
    with undisturbed(chain):
        for _ in range(times):
            x, boundaries = images, boundaries[:1]
            for block in range(blocks):
                start = time.perf_counter()
                x = one_block(lambda x, block=block: run(x, block, block + 1), x, name=chain.blocks[block].name)  # type: ignore[misc]
                least[block] = min(least[block], time.perf_counter() - start)
                boundaries.append(Boundary.of(x))
    return Trial(tuple(boundaries), tuple(least))


def one_block(run: Callable[[Tensor], Tensor], x: Tensor, *, name: str) -> Tensor:
    """Return a block's output, without gradient, after a forward and a backward pass."""
    try:
        output = run(x.detach().requires_grad_())
        output.backward(torch.ones_like(output))
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"block {name} cannot train on micro-batches of {len(x)} samples ({error}); lower --micro-batches, or "
            "raise --batch-size"
        ) from error
    return output.detach()


@contextmanager
def undisturbed(chain: Chain) -> Iterator[None]:
    """Undo what a trial in training mode changes."""
    kept = [(buffer, buffer.clone()) for _, buffer in chain.named_buffers()]
    training = chain.model.training
    try:
        with torch.random.fork_rng(devices=[]):
            chain.model.train()
            yield
    finally:
        chain.model.train(training)
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
        for parameter in chain.model.parameters():
            parameter.grad = None


def sizes_of(rows: int, parts: int) -> Sequence[int]:
    """Return how many of a batch's `rows` samples each of its `parts` micro-batches has: the first ones one more."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]
