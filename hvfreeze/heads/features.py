"""Features that a head is solved on: every block's output, pooled, or what the model's own last layer takes.

Earlier blocks keep what the last one threw away: Evci et al., "Head2Toe: Utilizing Intermediate Representations for
Better Transfer Learning" (ICML 2022).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.chain.blocks import Chain
from hvfreeze.errors import UsageError

CHANNELS_LAST_IN_NAME = "SwinTransformer"
"""Torchvision's one family whose blocks give maps as (B, H, W, C)."""


class Features(Protocol):
    """Images, (B, ...), to one row of features each, (B, D) float32, with the gradient mode of the caller."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return (B, D) float32; the images are not changed."""


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
        """Return the blocks' features side by side, in forward order."""
        parts = []
        for block in self._blocks:
            images = block(images)
            maps = images.permute(0, 3, 1, 2) if self._channels_last and images.dim() == 4 else images
            parts.append(pooled(maps, self._pool))
        return torch.cat(parts, 1)


class LastBlock:
    """What the model's last linear layer takes."""

    def __init__(self, chain: Chain, *, example: Tensor) -> None:
        """Find the layer, by running `example`, (B, ...), in evaluation mode.

        Raises:
            UsageError: the model does not end in a linear layer.
        """
        self.layer = _last_linear(chain)
        self._chain = chain
        modes = {module: module.training for module in chain.model.modules()}
        chain.model.eval()
        try:
            with torch.no_grad():
                taken, logits = self._run(example)
                same = taken.dim() == 2 and torch.equal(self.layer(taken), logits)
        finally:
            for module, mode in modes.items():
                module.training = mode
        if not same:
            raise UsageError(_no_linear_end(chain))

    def __call__(self, images: Tensor) -> Tensor:
        """Return the last linear layer's inputs."""
        return self._run(images)[0].float()

    def _run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        taken: list[Tensor] = []
        hook = self.layer.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
        try:
            logits = self._chain(images)
        finally:
            hook.remove()
        if len(taken) != 1:
            raise UsageError(_no_linear_end(self._chain))
        return taken[0], logits


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


def _last_linear(chain: Chain) -> nn.Linear:
    linear = [module for module in _leaves(chain.modules(len(chain.blocks) - 1)) if isinstance(module, nn.Linear)]
    if not linear:
        raise UsageError(_no_linear_end(chain))
    return linear[-1]


def _leaves(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if not any(True for _ in module.children())]


def _no_linear_end(chain: Chain) -> str:
    return (
        f"head fit (exact): {type(chain.model).__name__} does not end in a linear layer that could be solved; "
        "pass --head multi-level, whose head is one, or --head-fit sgd"
    )
