"""Features that a head is solved on: every block's output, pooled, or what the model's own last layer takes.

Earlier blocks keep what the last one threw away: Evci et al., "Head2Toe: Utilizing Intermediate Representations for
Better Transfer Learning" (ICML 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.map_layout import channels_last, tokens_last
from hvfreeze.model.steps import Call


class EveryBlock:
    """Every block's output but the head's: maps pooled to at most `pool` x `pool` cells, tokens to their mean."""

    def __init__(self, chain: Chain, *, pool: int, turned: bool) -> None:
        """Take a chain of at least two blocks, `pool`, at least 1, and whether its maps have their channels last."""
        self._blocks = chain.blocks[:-1]
        self._pool = pool
        self._channels_last = turned

    def __call__(self, images: Tensor) -> Tensor:
        """Return the blocks' features side by side, in forward order, (B, D) float32, for images (B, ...)."""
        parts = []
        for block in self._blocks:
            images = block(images)
            maps = images.permute(0, 3, 1, 2) if self._channels_last and images.dim() == 4 else images
            parts.append(pooled(maps, self._pool))
        return torch.cat(parts, 1)


class EveryBlockInItsLayout:
    """As `EveryBlock`, where some of the blocks' maps have their channels last, and others first, or tokens are last.

    A class of its own: rows of a cache are filed under the code that made them, and those of `EveryBlock` stay.
    """

    def __init__(self, chain: Chain, *, pool: int, turned: Sequence[bool]) -> None:
        """Take for each block but the last whether its output's last side belongs in the second place."""
        self._blocks = chain.blocks[:-1]
        self._pool = pool
        self._turned = tuple(turned)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the blocks' features side by side, in forward order, (B, D) float32, for images (B, ...)."""
        parts = []
        for block, turned in zip(self._blocks, self._turned):
            images = block(images)
            parts.append(pooled(images.movedim(-1, 1) if turned else images, self._pool))
        return torch.cat(parts, 1)


class MeanWithMirrorImage:
    """The mean of the features of an image and of its mirror image, which then has the same: two passes."""

    def __init__(self, read: EveryBlock | EveryBlockInItsLayout) -> None:
        """Take what makes features of images."""
        self._read = read

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features, (B, D) float32, for images (B, C, H, W)."""
        return (self._read(images) + self._read(images.flip(3))) / 2


def every_block(chain: Chain, *, pool: int, example: Tensor) -> EveryBlock | EveryBlockInItsLayout:
    """Return what makes features of every block but the last; of `example`, (B, ...), only the shape counts.

    Raises:
        UsageError: there is no block before the head, `pool` is below 1, or a block's maps cannot be understood.
    """
    if len(chain.blocks) < 2:
        raise UsageError(
            f"head (multi-level): {type(chain.model).__name__} has one block only, its head; name finer --blocks"
        )
    if pool < 1:
        raise UsageError(f"pool ({pool}) must be at least 1: cells a side that each block's map is averaged to")
    stops = range(1, len(chain.blocks))
    turned, swapped = channels_last(chain, stops, example=example), tokens_last(chain, stops, example=example)
    if any(swapped) or len({known for known in turned if known is not None}) > 1:
        either = [bool(known) or tokens for known, tokens in zip(turned, swapped)]
        return EveryBlockInItsLayout(chain, pool=pool, turned=either)
    return EveryBlock(chain, pool=pool, turned=any(turned))


def laid_out(read: EveryBlock | EveryBlockInItsLayout, number: int, output: Tensor) -> Tensor:
    """Return the output of block `number` as `read` pools it."""
    if isinstance(read, EveryBlockInItsLayout):
        return output.movedim(-1, 1) if read._turned[number] else output
    return output.permute(0, 3, 1, 2) if read._channels_last and output.dim() == 4 else output


def pooled(output: Tensor, pool: int) -> Tensor:
    """Return a block's `output` as (B, K) float32.

    A map, (B, C, H, W), is averaged to at most `pool` cells a side, then flattened; tokens, (B, T, D), are averaged;
    vectors stay.

    Raises:
        UsageError: the output is none of these.
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
        f"head (multi-level): a block gives a tensor of shape {tuple(output.shape)}; features are made of maps "
        "(B, C, H, W), tokens (B, T, D) and vectors (B, D): name other --blocks"
    )


def before_last_layer(chain: Chain) -> tuple[tuple[Call, ...], nn.Linear]:
    """Return the steps of the head block without its last layer, and that layer.

    Raises:
        UsageError: the model does not end in a linear layer with a bias, by itself or in an nn.Sequential.
    """
    steps = chain.blocks[-1].steps
    while isinstance(steps[-1], nn.Sequential) and type(steps[-1]).forward is nn.Sequential.forward:
        steps = (*steps[:-1], *steps[-1])
    layer = steps[-1]
    # A subclass may compute something else.
    if type(layer) is not nn.Linear or layer.bias is None:
        raise UsageError(
            f"head-fit (exact): {type(chain.model).__name__} does not end in a linear layer with a bias, which could "
            "be solved; pass --head multi-level, whose head is one"
        )
    return steps[:-1], layer
