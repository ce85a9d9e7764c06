"""Data sets whose samples have several labels, or numbers: pairs of digits on one image, and digits that are turned."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from hvfreeze.data.data_sets import digits_table

SAMPLES = {"train": 240, "test": 120}


class Listed:
    """(image, label) by number."""

    flips = False

    def __init__(self, images: list[Image.Image], labels: Any, classes: list[str]) -> None:
        self.images, self.targets, self.classes = images, labels, classes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Image.Image, Any]:
        return self.images[row], self.targets[row]


def digits(split: str, *, seed: int) -> tuple[Any, Any, np.random.Generator]:
    """Return images (N, 8, 8) of 0..16, and digits, of a split's own, and what draws."""
    images, targets = digits_table()
    own = np.arange(len(images)) % 3 == 0
    chosen = own if split == "test" else ~own
    return images[chosen], targets[chosen], np.random.default_rng([seed, split == "test"])


def pairs(split: str, samples: dict[str, int] = SAMPLES) -> Listed:
    """Two digits side by side, and which of five digits are among them."""
    images, targets, draw = digits(split, seed=1)
    chosen = np.flatnonzero(targets < 6)
    rows = draw.choice(chosen, (samples[split], 2))
    both = [np.concatenate([np.pad(images[one], 4), np.pad(images[other], 4)], 1) for one, other in rows]
    pictures = [Image.fromarray((each * 15.9).astype(np.uint8)).resize((64, 32)) for each in both]
    labels = (targets[rows][:, :, None] == np.arange(5)).any(1)
    return Listed(pictures, labels, [f"has {digit}" for digit in range(5)])


def turned(split: str, samples: dict[str, int] = SAMPLES) -> Listed:
    """A digit, and by how many degrees it is turned."""
    images, targets, draw = digits(split, seed=2)
    rows = draw.choice(np.flatnonzero(np.isin(targets, (2, 3, 4, 5, 7))), samples[split])
    angles = draw.uniform(-60, 60, samples[split])
    pictures = [
        Image.fromarray((np.pad(images[row], 4) * 15.9).astype(np.uint8)).resize((32, 32)).rotate(angle)
        for row, angle in zip(rows, angles)
    ]
    return Listed(pictures, angles.astype(np.float32)[:, None], ["degrees"])
