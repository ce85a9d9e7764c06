"""Folders that are splits of a data set, however it spells them: train, Training, val2017, seg_test, 01_validation."""

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
"""Words that name a split. The first one wins where several folders do, such as test and eval."""
EXTRA = ("data", "dataset", "folder", "image", "images", "img", "imgs", "set", "sets", "split")
"""Words that say nothing about which split it is, alone or at the end of another: Train Images, testset."""
_SPLIT_OF = {word: split for split, words in SPELLINGS.items() for word in words}
_COMPOUND = re.compile(rf"({'|'.join(_SPLIT_OF)})({'|'.join(EXTRA)})")


def split_of(name: str) -> tuple[str, str] | None:
    """Return the split that a folder's name tells, and the rest of the name; None where it tells none.

    Digits and `EXTRA` belong to no rest: 01_train, train2017 and TrainSet are train with an empty rest.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+", name)]
    words = [found[1] if (found := _COMPOUND.fullmatch(word)) else word for word in words]
    splits = [_SPLIT_OF[word] for word in words if word in _SPLIT_OF]
    if len(splits) != 1:
        return None
    return splits[0], " ".join(word for word in words if word not in _SPLIT_OF and word not in EXTRA)


def find_split_folders(root: object, names: Sequence[str], holds_images: Callable[[str], bool]) -> dict[str, str]:
    """Return which of the folders `names` in `root` are its splits, by split; none where these are classes.

    Several splits have equal rests: seg_train goes with seg_test, but train_station and test_tube are two classes. A
    lone one has no rest, and no images outside of class folders: else it is a class, such as a vehicle.

    Args:
        root: what messages call it.
        names: of all folders in it.
        holds_images: tells whether images lie right in a folder.

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
