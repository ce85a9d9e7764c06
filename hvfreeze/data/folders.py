"""Class folders on disk: which image files make up which split, in the order that gives samples their ids."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hvfreeze.data.shards import split_validation
from hvfreeze.data.sources import SUFFIXES, open_image, unreadable
from hvfreeze.errors import RefusedError

_PROBES = 64
_HOLD_OUT_FRACTION = 0.1
_HOLD_OUT_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of one split. A sample's id is its place in `paths`."""

    root: Path
    classes: tuple[str, ...]
    """Folder names sorted as bytes."""
    paths: tuple[str, ...]
    """CLASS/.../IMAGE relative to `root`, sorted as bytes."""

    def labels(self) -> list[int]:
        """Return the class of every path, an index into `classes`."""
        label_of = {name: label for label, name in enumerate(self.classes)}
        return [label_of[path.partition("/")[0]] for path in self.paths]

    def sizes(self) -> dict[tuple[int, int], Path]:
        """Return the distinct (height, width) of at most 64 evenly spaced images, each with one of its files.

        Raises:
            RefusedError: One of them is not an image.
        """
        found: dict[tuple[int, int], Path] = {}
        for row in np.unique(np.linspace(0, len(self.paths) - 1, _PROBES).astype(int)):
            path = self.root / self.paths[row]
            with open_image(path) as image:
                found.setdefault((image.height, image.width), path)
        return found


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder.

    Raises:
        RefusedError: The folders above it cannot be read.
    """
    try:
        return path.is_dir()
    except OSError as error:
        raise unreadable(path, error) from error


def scan(root: Path, *, fewest: int = 2) -> Listing:
    """Return all images below `root`, whose folders are the classes; sub-folders of a class belong to it.

    Names that begin with a dot, and files that are no images by their suffix, are passed over.

    Raises:
        RefusedError: The folder is missing, unreadable or empty, holds fewer than `fewest` classes, or a class has no
            image.
    """
    classes = [name for name, folder in _entries(root) if folder]
    if not classes:
        raise RefusedError(f"{root} holds no class folders; expected {root}/CLASS/IMAGE for at least two classes")
    paths: list[str] = []
    for name in classes:
        inside = images_below(root / name)
        if not inside:
            raise RefusedError(
                f"class folder {root / name} holds no image ({', '.join(SUFFIXES)}); add images or remove the folder"
            )
        paths += [f"{name}/{path}" for path in inside]
    if len(classes) < fewest:
        raise RefusedError(f"{root} holds one class only ({classes[0]}); training needs at least two class folders")
    return Listing(
        root=root, classes=tuple(sorted(classes, key=os.fsencode)), paths=tuple(sorted(paths, key=os.fsencode))
    )


def images_below(folder: Path) -> list[str]:
    """Return the images in a folder and its sub-folders, relative to it and sorted as bytes, as `scan` sees them.

    Raises:
        RefusedError: a folder cannot be read.
    """
    paths, pending = [], [""]
    while pending:
        parent = pending.pop()
        for entry, is_dir in _entries(folder / parent):
            if is_dir:
                pending.append(f"{parent}{entry}/")
            elif entry.lower().endswith(SUFFIXES):
                paths.append(f"{parent}{entry}")
    return sorted(paths, key=os.fsencode)


def find_splits(root: Path) -> tuple[dict[str, Listing], list[str]]:
    """Return the listings `train`, `test` and, where there are train, val and test, `val`; and notes for the user.

    Raises:
        RefusedError: The folders are not a data set, or their classes differ.
    """
    present = [part for part in ("train", "val", "test") if is_folder(root / part)]
    if not present:
        return _hold_out(scan(root))
    if "train" not in present or len(present) == 1:
        raise RefusedError(
            f"{root} holds {' and '.join(present)} alone; it must hold train/ with test/ or val/, or class folders only"
        )
    listings = {part: scan(root / part) for part in present}
    for listing in listings.values():
        odd = sorted(set(listing.classes) ^ set(listings["train"].classes))
        if odd:
            raise RefusedError(
                f"{root / 'train'} and {listing.root} must hold the same classes; {odd[0]} is in one only"
            )
    if "test" in listings:
        unused = [f"{root / 'val'} is not used: accuracy is on {root / 'test'}"] if "val" in listings else []
        return listings, unused
    return {"train": listings["train"], "test": listings["val"]}, [f"{root / 'val'} serves as the test set"]


def _hold_out(everything: Listing) -> tuple[dict[str, Listing], list[str]]:
    total = len(everything.paths)
    if total < 2 * len(everything.classes):
        raise RefusedError(
            f"{everything.root} holds {total} images, too few to hold out a test set; bring train/ and test/ folders"
        )
    fraction = max(_HOLD_OUT_FRACTION, 1 / total)
    kept, held = split_validation(everything.labels(), np.arange(total), fraction=fraction, seed=_HOLD_OUT_SEED)
    train, test = (replace(everything, paths=tuple(everything.paths[row] for row in ids)) for ids in (kept, held))
    note = f"{everything.root} has class folders only: a fixed {_HOLD_OUT_FRACTION:.0%} of each class is the test set"
    return {"train": train, "test": test}, [f"{note}, {len(held)} of {total} images"]


def _entries(folder: Path) -> list[tuple[str, bool]]:
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise unreadable(folder, error) from error
