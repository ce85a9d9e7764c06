"""Torchvision's random transforms as functions of (data seed, sample, view); no run's generator is drawn from."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvfreeze.data.draws import Bits
from hvfreeze.torchvision_shim import torchvision

JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
"""The usual strengths, as in SimCLR and torchvision's own examples."""
COLOURS = ("trivial-augment", "color-jitter")
"""What is done to the pixels of a crop, in this order."""


def version() -> str:
    """Return torchvision's version, on which the pixels of these transforms depend."""
    return str(torchvision.__version__)


def resized_crops(pixels: Tensor, *, seeds: Bits, height: int, width: int) -> Tensor:
    """Return for each of (B, C, H, W) uint8 a part of 8 % to 100 % of its area in another size, (B, C, height, width).

    Proportions vary between 3:4 and 4:3. Row i depends on `pixels[i]` and `seeds[i]` alone.
    """
    v2 = importlib.import_module("torchvision.transforms.v2")
    return each(v2.RandomResizedCrop((height, width), antialias=True), pixels, seeds)


def recoloured(pixels: Tensor, names: tuple[str, ...], *, seeds: Bits) -> Tensor:
    """Return (B, C, H, W) uint8 after the transforms of `COLOURS` that `names` has; row i depends on its seed alone."""
    v2 = importlib.import_module("torchvision.transforms.v2")
    known = {"trivial-augment": v2.TrivialAugmentWide, "color-jitter": lambda: v2.ColorJitter(**JITTER)}
    chosen = [known[name]() for name in COLOURS if name in names]
    return each(v2.Compose(chosen), pixels, seeds) if chosen else pixels


def each(transform: Callable[[Tensor], Any], pixels: Tensor, seeds: Bits) -> Tensor:
    """Return every row transformed with a generator that starts at its own seed; the run's generator stays as it is."""
    rows = []
    with torch.random.fork_rng(devices=[]):
        for row, seed in zip(pixels, seeds.tolist(), strict=True):
            torch.default_generator.manual_seed(seed >> 1)
            rows.append(transform(row))
    return torch.stack(rows) if rows else pixels
