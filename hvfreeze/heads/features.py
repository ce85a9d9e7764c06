"""Features for fitting a head: the pooled outputs of all blocks, or the input of the model's own last layer.

Earlier blocks retain information that the last one discards: Evci et al., "Head2Toe: Utilizing Intermediate
Representations for Better Transfer Learning" (ICML 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.config.head import TOKENS
from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.map_layout import channels_last, shapes_of, tokens_last
from hvfreeze.model.steps import Call


class EveryBlock:
    """The outputs of all blocks but the head: maps pooled to at most `pool` x `pool` cells, tokens in one form."""

    def __init__(
        self, chain: Chain, *, pool: int, turned: Sequence[bool], tokens: str = "mean", sides: tuple[int, ...] = ()
    ) -> None:
        """Take a chain of at least two blocks, and `pool`, at least 1.

        `turned` says for each block but the last whether to move the last dimension of its output to second place, as
        for channels-last maps.
        `tokens`, one of `config.head.TOKENS`, is the form of tokens (B, T, D); `sides` are the sides of images, (H,
        W).
        """
        self._blocks = chain.blocks[:-1]
        self._pool = pool
        self._turned = tuple(turned)
        self._tokens = tokens
        self._sides = sides

    def __call__(self, images: Tensor) -> Tensor:
        """Return the concatenated features of the blocks, in forward order, (B, D) float32, for images (B, ...)."""
        parts = []
        for number, block in enumerate(self._blocks):
            images = block(images)
            parts.append(self.part(number, images))
        return torch.cat(parts, 1)

    def part(self, number: int, output: Tensor) -> Tensor:
        """Return the features, (B, K) float32, of the output of block `number`."""
        if output.dim() == 3 and self._tokens != "mean" and not self._turned[number]:
            return read_tokens(output, self._tokens, pool=self._pool, sides=self._sides)
        return pooled(output.movedim(-1, 1) if self._turned[number] else output, self._pool)


class MeanWithMirrorImage:
    """The mean of the features of an image and its horizontal flip, in two forward passes."""

    def __init__(self, read: EveryBlock) -> None:
        """Take the function from images to features."""
        self._read = read

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features, (B, D) float32, for images (B, C, H, W)."""
        return (self._read(images) + self._read(images.flip(3))) / 2


def every_block(chain: Chain, *, pool: int, example: Tensor, tokens: str = "mean") -> EveryBlock:
    """Return the function from images to the features of all blocks but the last; `example`, (B, ...), sets the shape.

    `tokens`, one of `config.head.TOKENS`, is the form of tokens (B, T, D).

    Raises:
        UsageError: there is no block before the head, `pool` is below 1, or a block's layout is ambiguous.
    """
    if len(chain.blocks) < 2:
        raise UsageError(
            f"head (multi-level): {type(chain.model).__name__} has only one block, its head; use finer --blocks"
        )
    if pool < 1:
        raise UsageError(
            f"pool ({pool}) must be at least 1, the number of cells per side that a block's map is averaged to"
        )
    stops = range(1, len(chain.blocks))
    turned, swapped = channels_last(chain, stops, example=example), tokens_last(chain, stops, example=example)
    either = [bool(known) or odd for known, odd in zip(turned, swapped)]
    return EveryBlock(chain, pool=pool, turned=either, tokens=tokens, sides=tuple(example.shape[2:]))


def read_tokens(output: Tensor, tokens: str, *, pool: int, sides: tuple[int, ...]) -> Tensor:
    """Return the class token, (B, D), of tokens (B, T, D), or patches averaged to at most `pool` cells a side, (B, K).

    Raises:
        UsageError: there is no class token, or the patches do not form a grid for images of these sides, (H, W).
    """
    found = grid_of(output.shape[1], sides)
    if found is None or (tokens == "class" and found[0] == 0):
        what = "class token" if tokens == "class" else "grid of patches"
        raise UsageError(f"--tokens ({tokens}): the {output.shape[1]} tokens have no {what}; use --tokens mean")
    before, rows, columns = found
    if tokens == "class":
        return output[:, 0].float()
    return pooled(output[:, before:].transpose(1, 2).unflatten(2, (rows, columns)), pool)


MOST_BEFORE = 8
"""Largest number of tokens before the patches: class token and registers."""


def grid_of(tokens: int, sides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return the number of tokens that are not patches, and the rows and columns of the patches of an image (H, W).

    None if the patches do not form a grid of its proportions.
    """
    height, width = sides
    for before in range(min(MOST_BEFORE, tokens - 1) + 1):
        rows = math.isqrt((tokens - before) * height // width)
        columns, rest = divmod(tokens - before, max(1, rows))
        if rows and not rest and rows * width == columns * height:
            return before, rows, columns
    return None


def token_forms(chain: Chain, *, example: Tensor) -> tuple[str, ...]:
    """Return the forms of `config.head.TOKENS` that fit the tokens of the blocks; empty if no block has tokens."""
    if example.dim() != 4:
        return ()
    shapes = shapes_of(chain, range(1, len(chain.blocks)), example[:1])
    swapped = tokens_last(chain, range(1, len(chain.blocks)), example=example)
    counts = [shape[1] for shape, odd in zip(shapes, swapped) if len(shape) == 3 and not odd]
    grids = [grid_of(count, tuple(example.shape[2:])) for count in counts]
    if not counts:
        return ()
    if not all(grids):
        return ("mean",)
    return TOKENS if all(grid and grid[0] for grid in grids) else ("mean", "grid")


def pooled(output: Tensor, pool: int) -> Tensor:
    """Return a block's `output` as (B, K) float32.

    A map, (B, C, H, W), is averaged to at most `pool` cells a side, then flattened; tokens, (B, T, D), are averaged;
    vectors are unchanged.

    Raises:
        UsageError: the output has another shape.
    """
    if output.dim() == 4:
        height, width = (min(side, pool) for side in output.shape[2:])
        if (height, width) != output.shape[2:]:
            output = functional.adaptive_avg_pool2d(output, (height, width))
        return output.flatten(1).float()
    if output.dim() == 3:
        return output.mean(1).float()
    if output.dim() == 2:
        return output.float()
    raise UsageError(
        f"head (multi-level): a block returns a tensor of shape {tuple(output.shape)}, and features "
        f"need maps (B, C, H, W), tokens (B, T, D) or vectors (B, D); use other --blocks"
    )


def before_last_layer(chain: Chain) -> tuple[tuple[Call, ...], nn.Linear]:
    """Return the steps of the head block without its last layer, and that layer.

    Raises:
        UsageError: the model does not end in a linear layer with a bias, alone or in an nn.Sequential.
    """
    steps = chain.blocks[-1].steps
    while isinstance(steps[-1], nn.Sequential) and type(steps[-1]).forward is nn.Sequential.forward:
        steps = (*steps[:-1], *steps[-1])
    layer = steps[-1]
    # A subclass may compute something else.
    if type(layer) is not nn.Linear or layer.bias is None:
        raise UsageError(
            f"head-fit (exact): {type(chain.model).__name__} does not end in a linear layer with a "
            f"bias, which could be fitted; use --head multi-level"
        )
    return steps[:-1], layer
