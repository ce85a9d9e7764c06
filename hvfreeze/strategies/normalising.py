"""Whether batches have enough values for BatchNorm to normalise."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.errors import UsageError
from hvfreeze.strategies.cutting import example_images
from hvfreeze.strategies.strategy import Materials


@torch.no_grad()
def check_rows(materials: Materials, *, start: int, rows: int, asked: str) -> None:
    """Refuse batches of one sample where a block that trains would normalise a single value of it.

    The model's running statistics and modes stay as they are.

    Args:
        materials: with the chain, all of whose blocks are here.
        start: the first block that trains.
        rows: samples of the smallest batch that is trained on.
        asked: the settings that make them so many, with their values.

    Raises:
        UsageError: such a block's BatchNorm could not be trained.
    """
    if rows > 1:
        return
    chain, images = materials.chain, example_images(materials, rows=1)
    modes = {module: module.training for module in chain.model.modules()}
    single, hooks = [], []

    def look(module: Any, given: Any) -> None:
        if given[0].numel() == given[0].shape[1]:
            single.append(module)

    try:
        for module in modes:
            module.training = False
        for module in chain.modules(start):
            if isinstance(module, _BatchNorm):
                hooks.append(module.register_forward_pre_hook(look))
        chain.run(images, 0, len(chain.blocks))
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    if single:
        name = next(name for name, module in chain.model.named_modules() if module is single[0])
        raise UsageError(
            f"{asked} must leave at least 2 samples to a batch with images of {images.shape[2]}x{images.shape[3]} "
            f"pixels: BatchNorm {name} would normalise a single value; or give a larger --image-size"
        )
