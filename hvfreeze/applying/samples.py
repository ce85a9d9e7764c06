"""The labelled images that a model is evaluated on: the run's own, or those of a folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hvfreeze.applying.answering import Decode
from hvfreeze.applying.model import Applied
from hvfreeze.config.tree import from_dict
from hvfreeze.data.dealing import choose
from hvfreeze.data.decoding import find_broken
from hvfreeze.data.draws import Ids
from hvfreeze.data.on_disk.cifar import ARCHIVES
from hvfreeze.data.on_disk.folders import is_folder, scan
from hvfreeze.data.sets.image_set import ImageSet
from hvfreeze.data.sets.opening import open_data
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.named_code import is_named_code
from hvfreeze.runs.reading import read_config


@dataclass(frozen=True, eq=False)
class Samples:
    """Images and what they show."""

    decode: Decode
    labels: Tensor
    """(N,) int64, indices of the model's classes."""
    name: str
    """What they are, for a line."""
    own: bool
    """Whether the run was evaluated on these."""


def own_samples(applied: Applied, run_dir: Path, *, trust_code: bool = False) -> Samples:
    """Return the samples on which the run reported its accuracy.

    Raises:
        RefusedError: the configuration or the data is missing or damaged, or the data is not what it was.
    """
    path = run_dir / "config.yaml"
    try:
        config = from_dict(read_config(path), source=str(path))
    except UsageError as error:
        raise RefusedError(f"{path} is damaged or of another version: {error}") from error
    if config.strategy.tasks is not None:
        raise RefusedError(
            f"the run's models have their labels from a table ({config.strategy.tasks}), which is not read here; give "
            f"--data-dir DIR, a folder with a folder for each class: {', '.join(applied.classes)}"
        )
    data = config.data
    if is_named_code(data.data) and not trust_code:
        raise RefusedError(
            f"{path}: the data is made by {data.data}, which is code of its own; where you trust "
            "it, pass --trust-code, or name other data with --data-dir"
        )
    splits = open_data(data.data, data.data_dir, image_size=data.stored_size)
    if data.skip_bad:
        train, test = (replace(part, broken=find_broken(part)) for part in (splits.train, splits.test))
        splits = replace(splits, train=train, test=test)
    _, image_set, ids = choose(splits, data, seed=config.data_seed)
    held_out = data.validation_fraction > 0
    return samples_of(applied, image_set, ids, name=f"{'held-out' if held_out else 'test'} samples of the run's data")


def samples_of(applied: Applied, image_set: ImageSet, ids: Ids, *, name: str) -> Samples:
    """Return samples of a data set of the model's own classes and size."""
    if image_set.classes != applied.classes or image_set.image_shape[1:] != (
        applied.transform.height,
        applied.transform.width,
    ):
        raise RefusedError(
            f"the run's data ({image_set.name}) has changed: it has {len(image_set.classes)} classes of images of "
            f"{image_set.image_shape[2]}x{image_set.image_shape[1]} pixels, and the model was trained on "
            f"{len(applied.classes)} of {applied.transform.width}x{applied.transform.height}; restore it, or name "
            "other data with --data-dir"
        )
    labels = image_set.labels[torch.from_numpy(ids)]
    return Samples(lambda row: image_set.decode(int(ids[row])), labels, name, own=True)


def samples_in(applied: Applied, folder: Path) -> Samples:
    """Return the images of DIR/test, else of DIR/val, else of the class folders in DIR; or an archive's test split.

    Raises:
        RefusedError: there are none, or a class folder is none of the model's classes.
    """
    data = applied.card.data
    if data in ARCHIVES and is_folder(folder / ARCHIVES[data].folder):
        test = open_data(data, folder).test
        labels, prepare = test.labels, applied.transform.pixels
        return Samples(
            lambda row: prepare(torch.from_numpy(test.decode(row))), labels, f"test samples of {folder}", own=False
        )
    root = next((folder / part for part in ("test", "val") if is_folder(folder / part)), folder)
    if not is_folder(root):
        raise RefusedError(f"data folder {root} does not exist; name one with --data-dir")
    listing = scan(root, fewest=1)
    unknown = [name for name in listing.classes if name not in applied.classes]
    if unknown:
        raise RefusedError(
            f"class folder {root / unknown[0]} is none of the model's {len(applied.classes)} classes; rename it or "
            "take it out"
        )
    index = {name: label for label, name in enumerate(applied.classes)}
    labels = torch.tensor([index[listing.classes[label]] for label in listing.labels()], dtype=torch.int64)
    paths = [root / path for path in listing.paths]
    return Samples(lambda row: applied.transform.pixels_of(paths[row]), labels, f"images of {root}", own=False)
