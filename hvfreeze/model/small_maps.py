"""Find images that are too small for a network: feature maps of one pixel, on which convolutions have no neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hvfreeze.model.modes import in_evaluation, state_kept

MOST = 1 / 3
"""Share of convolutions on maps of one pixel that is accepted. With 32 pixels, torchvision's networks have up to
29 % (SqueezeNet 44 %), with 16 pixels 39 % and more."""
LARGEST_SIDE = 64
"""Networks reduce maps by a factor of 32 or less, so from this side on all maps have several pixels."""


def convolutions_on_pixels(model: nn.Module, image_shape: Sequence[int]) -> tuple[int, int]:
    """Return how many convolutions larger than 1 x 1 get maps of one pixel, and how many there are.

    `image_shape` is (C, H, W).
    """
    sides: list[int] = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sides.append(max(inputs[0].shape[2:]))

    spatial = [part for part in model.modules() if isinstance(part, nn.Conv2d) and max(part.kernel_size) > 1]
    hooks = [part.register_forward_pre_hook(look) for part in spatial]
    try:
        with state_kept(model), in_evaluation(model), torch.no_grad():
            model(torch.zeros(1, *image_shape))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(side == 1 for side in sides), len(sides)


def note_on_small_maps(name: str, model: nn.Module, image_shape: Sequence[int]) -> list[str]:
    """Return a note if images of (C, H, W) are too small for the model, with a side that is large enough."""
    side = max(image_shape[1:], default=LARGEST_SIDE)
    if side >= LARGEST_SIDE:
        return []
    found, count = convolutions_on_pixels(model, image_shape)
    if found <= MOST * count:
        return []
    sides = (2 * side, 4 * side, 8 * side, 16 * side)
    larger = next((larger for larger in sides if is_enough(model, (image_shape[0], larger, larger))), None)
    way = f"--image-size {larger} or more" if larger else "a larger --image-size"
    maps = f"{found} of {count} convolutions get maps of 1 x 1 pixel"
    return [f"images of {side} pixels are too small for {name}: {maps}; use {way}"]


def is_enough(model: nn.Module, image_shape: Sequence[int]) -> bool:
    """Return True if images of this shape are large enough for a model, which may be made for another one."""
    try:
        found, count = convolutions_on_pixels(model, image_shape)
    except Exception:  # a custom model may fail in any way
        return False
    return found <= MOST * count
