"""Writes CIFAR-10 with wrong labels, and with rare classes: python -m analysis.spoiled CIFAR DIR.

CIFAR/{train,test}/CLASS has the images. DIR/wrong-labels has a fifth of its training images in the folder of another
class. DIR/rare-classes has 1,500 training images of the first class and 15 of the last; each class has 0.6 times the
images of the one before. Both have the same test images, with their own labels, as many of each class.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from analysis.parts.class_folders import class_folder, files_of_classes
from analysis.sweeps.options import folder_to_write

IMAGES, TEST_IMAGES = 5_000, 2_000
WRONG = 0.2
MOST, FEWER = 1_500, 0.6


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both tasks and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.spoiled", description=__doc__.partition("\n")[0])
    parser.add_argument("images", type=Path, metavar="CIFAR")
    parser.add_argument("folder", type=folder_to_write, metavar="DIR")
    options = parser.parse_args(arguments)
    train, test = (files_of_classes(options.images, part) for part in ("train", "test"))
    equal = dict.fromkeys(train, IMAGES // max(1, len(train)))
    rare = {name: round(MOST * FEWER**place) for place, name in enumerate(train)}
    tests = dict.fromkeys(train, TEST_IMAGES // max(1, len(train)))
    few = too_few(train, equal) or too_few(train, rare) or too_few(test, tests)
    if few or not train:
        parser.error(f"CIFAR ({options.images}) has too few images in {{train,test}}/CLASS: {few or 'none'}")
    random = np.random.default_rng(0)
    tasks = {"wrong-labels": mislabel(draw(train, equal, random), random), "rare-classes": draw(train, rare, random)}
    tested = draw(test, tests, random)
    for name, images in tasks.items():
        write(options.folder / name, "train", images)
        write(options.folder / name, "test", tested)
    return 0


def too_few(files: Mapping[str, Sequence[Path]], counts: Mapping[str, int]) -> str:
    """Return in words which classes have fewer images than wanted; empty if none has."""
    found = {name: len(files.get(name, ())) for name in counts}
    return ", ".join(f"{name} {found[name]} of {count}" for name, count in counts.items() if found[name] < count)


def draw(
    files: Mapping[str, Sequence[Path]], counts: Mapping[str, int], random: np.random.Generator
) -> list[tuple[str, Path]]:
    """Return random images with their classes, so many of each class."""
    return [
        (name, files[name][index])
        for name, count in counts.items()
        for index in random.choice(len(files[name]), count, replace=False)
    ]


def mislabel(images: Sequence[tuple[str, Path]], random: np.random.Generator) -> list[tuple[str, Path]]:
    """Return the images; the part `WRONG` of them has a random other class."""
    names = sorted({name for name, _ in images})
    spoiled = list(images)
    for index in random.choice(len(images), round(WRONG * len(images)), replace=False):
        name, path = images[index]
        spoiled[index] = str(random.choice([other for other in names if other != name])), path
    return spoiled


def write(folder: Path, part: str, images: Sequence[tuple[str, Path]]) -> None:
    """Copy images into the folders of their classes."""
    for number, (name, path) in enumerate(images):
        shutil.copyfile(path, class_folder(folder, part, name) / f"{number}{path.suffix}")


if __name__ == "__main__":
    sys.exit(main())
