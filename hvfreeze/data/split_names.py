"""Folder names of dataset splits in all spellings: train, Training, val2017, seg_test, 01_validation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from hvfreeze.errors import RefusedError

SPELLINGS = {
    "train": ("train", "training", "trn", "trainval"),
    "val": ("val", "valid", "validation", "validate", "vld", "dev"),
    "test": ("test", "testing", "tst", "eval", "evaluation", "holdout"),
}
"""Names of each split, by priority: of test and eval, test is the test set."""
EXTRA = ("data", "dataset", "folder", "image", "images", "img", "imgs", "set", "sets", "split")
"""Words without meaning for the split, alone or as a suffix: Train Images, testset."""
_SPLIT_OF = {word: split for split, words in SPELLINGS.items() for word in words}
_COMPOUND = re.compile(rf"({'|'.join(_SPLIT_OF)})({'|'.join(EXTRA)})")


def split_of(name: str) -> tuple[str, str] | None:
    """Return the split in a folder's name and the rest of the name; None if it names no split.

    The rest has no digits and no `EXTRA`: 01_train, train2017 and TrainSet are train with an empty rest.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+", name)]
    words = [found[1] if (found := _COMPOUND.fullmatch(word)) else word for word in words]
    splits = [_SPLIT_OF[word] for word in words if word in _SPLIT_OF]
    if len(splits) != 1:
        return None
    return splits[0], " ".join(word for word in words if word not in _SPLIT_OF and word not in EXTRA)


def find_split_folders(root: object, names: Sequence[str], holds_images: Callable[[str], bool]) -> dict[str, str]:
    """Return the split folders among `names` in `root`, by split; empty if the folders are classes.

    Splits must have equal rests: seg_train matches seg_test, but train_station and test_tube are two classes. A single
    split has no rest and no images outside class folders; else it is a class, such as trains.

    Args:
        root: the folder, for messages.
        names: names of all folders in `root`.
        holds_images: returns True if images are directly in a folder.

    Raises:
        RefusedError: several folders name the same split.
    """
    named = [(*found, name) for name in names if (found := split_of(name))]
    families = [(_of_family(root, members), rest) for rest, members in groupby(sorted(named, key=_rest), _rest)]
    splits, rest = max(families, key=lambda family: len(family[0]), default=({}, ""))
    lone = len(splits) == 1
    return {} if lone and (rest or any(holds_images(name) for name in splits.values())) else splits


def _rest(member: tuple[str, str, str]) -> str:
    return member[1]


def _of_family(root: object, members: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for split, _, name in members:
        found.setdefault(split, []).append(name)
    for split, names in found.items():
        if len(names) > 1 and split not in names:
            several = ", ".join(sorted(names))
            raise RefusedError(f"{root} holds several {split} folders: {several}; keep one of them, or name it {split}")
    return {split: split if split in names else names[0] for split, names in found.items()}
