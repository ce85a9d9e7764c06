"""Writes images turned by 0, 90, 180 or 270 degrees, which are the classes: python -m analysis.rotated CIFAR DIR.

CIFAR/{train,test}/CLASS has the images. DIR/{train,test}/<degrees>/<i>.png, the same pixels on every machine. A flip
reverses the rotation, so training on horizontal flips would use wrong labels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from analysis.parts.class_folders import class_folder
from analysis.sweeps.options import folder_to_write

PARTS = {"train": (5_000, 0), "test": (2_000, 1)}
"""Name -> number of images and seed."""
DEGREES = (0, 90, 180, 270)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both parts and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.rotated", description=__doc__.partition("\n")[0])
    parser.add_argument("images", type=Path, metavar="CIFAR")
    parser.add_argument("folder", type=folder_to_write, metavar="DIR")
    options = parser.parse_args(arguments)
    for part, (count, seed) in PARTS.items():
        files = sorted(path for path in (options.images / part).glob("*/*") if path.is_file())
        if len(files) < count:
            parser.error(
                f"CIFAR ({options.images / part}) has {len(files)} files in folders of classes; {count} needed"
            )
        random = np.random.default_rng(seed)
        chosen = random.choice(len(files), count, replace=False)
        for number, (index, turn) in enumerate(zip(chosen, random.choice(DEGREES, count), strict=True)):
            place = class_folder(options.folder, part, turn)
            with Image.open(files[index]) as image:
                image.convert("RGB").rotate(int(turn)).save(place / f"{number}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
