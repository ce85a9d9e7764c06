"""Writes the images of dots that `analysis.tasks` counts: python -m analysis.dots DIR.

DIR/{train,test}/<number of dots>/<i>.png, the same pixels on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from analysis.parts.class_folders import class_folder
from analysis.sweeps.options import folder_to_write

PARTS = {"train": (4_000, 0), "test": (2_000, 1)}
"""Name -> number of images and seed."""
SIDE, DOT, APART = 32, 3, 3
"""Pixels: of an image, of a dot, and the most that two dots' corners lie apart in both directions where they touch."""
MOST = 6
NOISE, BRIGHT = (0, 100), (180, 256)
"""Grey values per channel of the background, and of a dot."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both parts and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.dots", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=folder_to_write, metavar="DIR")
    folder = parser.parse_args(arguments).folder
    for part, (count, seed) in PARTS.items():
        images, dots = draw(count, seed)
        for number, (image, label) in enumerate(zip(images, dots, strict=True)):
            Image.fromarray(image).save(class_folder(folder, part, label) / f"{number}.png")
    return 0


def draw(count: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images of 1 to 6 bright dots that do not touch, in noise, and how many dots each has.

    Args:
        count: N, of images.
        seed: of numpy's default generator.

    Returns:
        (N, 32, 32, 3) uint8 and (N,) 1-6.
    """
    random = np.random.default_rng(seed)
    images = random.integers(*NOISE, (count, SIDE, SIDE, 3)).astype(np.uint8)
    dots = random.integers(1, MOST + 1, count)
    for image, wanted in zip(images, dots, strict=True):
        corners: list[tuple[int, int]] = []
        while len(corners) < wanted:
            row, column = (int(place) for place in random.integers(1, SIDE - DOT, 2))
            if all(abs(row - other) > APART or abs(column - beside) > APART for other, beside in corners):
                corners.append((row, column))
                image[row : row + DOT, column : column + DOT] = random.integers(*BRIGHT)
    return images, dots


if __name__ == "__main__":
    sys.exit(main())
