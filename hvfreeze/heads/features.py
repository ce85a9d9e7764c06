"""Features that a head is solved on: every block's output, pooled, or what the model's own last layer takes.

Earlier blocks keep what the last one threw away: Evci et al., "Head2Toe: Utilizing Intermediate Representations for
Better Transfer Learning" (ICML 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.steps import Call
from hvfreeze.errors import UsageError

CHANNELS_LAST_IN_NAME = "SwinTransformer"
"""Torchvision's one family whose blocks give maps as (B, H, W, C)."""


class EveryBlock:
    """Every block's output but the head's: maps pooled to at most `pool` x `pool` cells, tokens to their mean."""

    def __init__(self, chain: Chain, *, pool: int) -> None:
        """Take a chain of at least two blocks and `pool`, at least 1.

        Raises:
            UsageError: there is no block before the head, or `pool` is below 1.
        """
        if len(chain.blocks) < 2:
            raise UsageError(
                f"head (multi-level): {type(chain.model).__name__} has one block only, its head; name finer --blocks"
            )
        if pool < 1:
            raise UsageError(f"pool ({pool}) must be at least 1: cells a side that each block's map is averaged to")
        self._blocks = chain.blocks[:-1]
        self._pool = pool
        self._channels_last = type(chain.model).__name__ == CHANNELS_LAST_IN_NAME

    def __call__(self, images: Tensor) -> Tensor:
        """Return the blocks' features side by side, in forward order, (B, D) float32, for images (B, ...)."""
        parts = []
        for block in self._blocks:
            images = block(images)
            maps = images.permute(0, 3, 1, 2) if self._channels_last and images.dim() == 4 else images
            parts.append(pooled(maps, self._pool))
        return torch.cat(parts, 1)


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
