"""Find feature maps of one pixel, on which convolutions have no neighbours: images are too small for the network."""

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


@torch.no_grad()
def run_convolutions(model: nn.Module, image_shape: Sequence[int]) -> list[tuple[nn.Conv2d, int, int]]:
    """Run a model on images of (C, H, W); return each call of a convolution, with the longer sides of both its maps.

    Modes, statistics and random state are unchanged.
    """
    calls: list[tuple[nn.Conv2d, int, int]] = []

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        calls.append((module, max(inputs[0].shape[2:]), max(output.shape[2:])))

    hooks = [module.register_forward_hook(look) for module in model.modules() if isinstance(module, nn.Conv2d)]
    try:
        with state_kept(model), in_evaluation(model):
            # Two images: `view` accepts more shapes for a single one.
            model(torch.zeros(2, *image_shape).contiguous(memory_format=torch.channels_last))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def convolutions_on_pixels(model: nn.Module, image_shape: Sequence[int]) -> tuple[int, int]:
    """Return how many convolutions larger than 1 x 1 get maps of one pixel, and how many there are."""
    sides = [side for module, side, _ in run_convolutions(model, image_shape) if max(module.kernel_size) > 1]
    return sides.count(1), len(sides)


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
