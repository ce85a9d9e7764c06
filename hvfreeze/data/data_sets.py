"""Datasets by name: digits, CIFAR, image folders, tables, text, Hugging Face and custom datasets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.config.data import is_table
from hvfreeze.data.cifar import ARCHIVES, Contents, download, read_archive
from hvfreeze.data.folders import Folders, absence_of, is_folder, list_folders, splits_in
from hvfreeze.data.hub_sets import load, open_hub, path_of
from hvfreeze.data.images import ArraySource, FileSource
from hvfreeze.data.own import DatasetSource, OwnSplit, open_own
from hvfreeze.data.reading import USUAL, PixelArray, Reading
from hvfreeze.data.shards import evenly, split_held_out
from hvfreeze.data.sizes import UNEQUAL_SIDE
from hvfreeze.data.tables import USUAL_COLUMNS, Columns, list_table
from hvfreeze.data.text import TextSource, split_text
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.files import cache_folder
from hvfreeze.imports import import_whole
from hvfreeze.rules import rule
from hvfreeze.tasks import TASKS, Task
from hvfreeze.user_code import HF, is_named_code
from hvfreeze.wording import first_few, plural


def digits_table() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return images (1797, 8, 8) with values 0..16, and digits (1797,), of scikit-learn's `load_digits`.

    Reads scikit-learn's file directly if possible: importing scikit-learn takes longer than an epoch of digits.
    """
    package = find_spec("sklearn")
    file = Path(package.origin or "").parent / "datasets/data/digits.csv.gz" if package else Path()
    if file.is_file():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(np.int64)
    digits = import_whole("sklearn.datasets").load_digits()
    return digits.images, digits.target


Triple = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSet:
    """One split of a dataset. A sample's id is its row, 0..N-1, the same on every rank and in every run."""

    name: str
    classes: tuple[str, ...]
    """Names of the model's outputs: classes, labels or numbers; for text, its characters."""
    labels: Tensor
    """Labels in the task's form, N rows; for windows of text, (N,) zeros."""
    mean: Triple
    """Mean of each channel, for pixels scaled to 0-1."""
    std: Triple
    flips: bool
    """Whether horizontal flips keep the label."""
    source: ArraySource | FileSource | DatasetSource | TextSource
    broken: Mapping[int, str] = field(default_factory=dict)
    """Samples that are left out because they cannot be decoded, with the reasons."""
    kind: str = "classes"
    """The kind of labels, a key of `tasks.TASKS`."""
    weights: Tensor | None = None
    """Weight of each training sample as given, (N,) float64, at least 0; None means equal weights."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def task(self) -> Task:
        """The task of a model of these samples."""
        return TASKS[self.kind](len(self.classes))

    @property
    def strata(self) -> NDArray[np.int64]:
        """Class of each sample for stratified sharding, (N,)."""
        return self.task.strata(self.labels).numpy()

    @property
    def ids(self) -> NDArray[np.int64]:
        """Ids of the usable samples, ascending: neither broken nor of weight 0."""
        usable = np.ones(len(self), np.bool_) if self.weights is None else self.weights.numpy() > 0
        return np.delete(np.arange(len(self)), [*self.broken, *np.flatnonzero(~usable)])

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of a decoded sample: (C, H, W) for images, (T,) for windows of T characters."""
        return self.source.image_shape

    def sample_digest(self) -> str:
        """Return the SHA-256 over the pixels of 16 evenly spaced samples, as hex."""
        digest = hashlib.sha256()
        for sample_id in evenly(self.ids, 16).tolist():
            # Loading the pixels reports all broken images together.
            with suppress(RefusedError):
                digest.update(np.ascontiguousarray(self.decode(sample_id)).data)
        return digest.hexdigest()

    def decode(self, sample_id: int) -> PixelArray:
        """Return the (C, H, W) uint8 pixels of one sample.

        Raises:
            RefusedError: the image is damaged or unreadable; names the file.
            UsageError: the image has another size than the others, without --image-size; names the file.
        """
        return self.source.decode(sample_id)

    def called(self, sample_id: int) -> str:
        """Return the name of a sample in messages: its file, or its number if it has none."""
        source = self.source
        return str(source.root / source.paths[sample_id]) if isinstance(source, FileSource) else f"sample {sample_id}"

    def identity(self, *, local: bool = True) -> str:
        """Return a digest of the decoded pixels, the labels and the classes.

        Args:
            local: whether to include modification times, which detect more changes to image files. Pass False to
                compare machines, whose copies of a folder have different times.
        """
        kind = () if self.kind == "classes" else (self.kind,)
        digest = hashlib.sha256(repr((self.name, self.classes, *kind)).encode())
        # Numbers without more digits have the identity that they had as float32.
        short = self.labels.float() if self.labels.dtype == torch.float64 else self.labels
        digest.update((short if torch.equal(short.to(self.labels.dtype), self.labels) else self.labels).numpy().data)
        digest.update(self.source.identity(local=local).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class DataSplits:
    """The splits of a dataset, with equal classes and image shapes."""

    train: ImageSet
    test: ImageSet
    notes: list[str] = field(default_factory=list)
    """Log lines on how the splits were made, one sentence each."""


# Mean and standard deviation per channel of the training pixels, scaled to 0-1.
_STATISTICS: dict[str, tuple[Triple, Triple]] = {
    "digits": ((0.3053, 0.3053, 0.3053), (0.3759, 0.3759, 0.3759)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagefolder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
MOST_CLASSES = 1000
"""Number of different labels above which classes must have two training samples on average."""


def default_directory() -> Path:
    """Return $HVFREEZE_DATA, or the user's cache directory for data.

    Raises:
        UsageError: neither is known.
    """
    named = os.environ.get("HVFREEZE_DATA")
    return Path(named) if named else cache_folder("data", way_out="name a folder with --data-dir or $HVFREEZE_DATA")


def prepare_data(name: str, directory: str | os.PathLike[str] | None) -> None:
    """Download CIFAR if it is absent, or fill the cache of Hugging Face's library.

    One rank per node calls it before a barrier.

    Raises:
        RefusedError: the data is absent and cannot be downloaded.
    """
    root = root_of(name, directory)
    if name.startswith(HF):
        load(name)
    if name in ARCHIVES and not is_folder(root / ARCHIVES[name].folder) and not has_splits(root):
        download(root, ARCHIVES[name])


def has_splits(root: Path) -> bool:
    """Return True if a folder exists and holds splits."""
    return is_folder(root) and bool(splits_in(root))


def root_of(name: str, directory: str | os.PathLike[str] | None) -> Path:
    """Return the folder of a dataset; the working directory for datasets that need none.

    The default folder of a table's images is the table's own.

    Raises:
        UsageError: no folder is named and there is no default.
    """
    if directory is not None:
        return Path(directory)
    if is_table(name):
        return Path(name).parent
    if name.startswith(HF):
        return path_of(name)
    return Path() if name in ("digits", "text") or is_named_code(name) else default_directory()


def list_data(name: str, directory: str | os.PathLike[str] | None, columns: Columns = USUAL_COLUMNS) -> Folders | None:
    """List the image files of a tree or a table for `open_data`, in one pass; None for other datasets.

    Raises:
        RefusedError: data is missing, unreadable or inconsistent.
    """
    root = root_of(name, directory)
    if is_table(name):
        return list_table(Path(name), root, columns)
    if name not in _STATISTICS or name == "digits" or (name in ARCHIVES and is_folder(root / ARCHIVES[name].folder)):
        return None
    if not is_folder(root):
        way_out = "" if directory is not None else " with --data-dir or $HVFREEZE_DATA"
        raise RefusedError(f"data folder {root} {absence_of(root)}; name an existing folder of images{way_out}")
    if name in ARCHIVES and not splits_in(root):
        raise RefusedError(
            f"{root} holds neither {ARCHIVES[name].folder}/ nor train/ and test/; name the folder that does with "
            "--data-dir or $HVFREEZE_DATA"
        )
    return list_folders(root)


def open_data(
    name: str,
    directory: str | os.PathLike[str] | None = None,
    *,
    image_size: int | None = None,
    listed: Folders | None = None,
    contents: Contents | None = None,
    reading: Reading = USUAL,
    skip_bad: bool = False,
    context: int = 64,
    task: str = "auto",
    columns: Columns = USUAL_COLUMNS,
) -> DataSplits:
    """Return the splits of a dataset, without decoding image files.

    Args:
        name: `digits`, `cifar10`, `cifar100`, `imagefolder`, `text`, the path of a table, see `data.tables`,
            hf:PATH, see `data.hub_sets`, or package:function, see `data.own`.
        directory: The folder with the data; None is `default_directory()`. `digits` needs none, `text` a file or none.
        image_size: Decoded images are squares of this side, or of the native shorter side where that is smaller (the
            transform enlarges them). None keeps the native size, which must then be one for all images.
        listed: The result of `list_data` on this rank or another one; None lists the files again.
        contents: The contents of CIFAR's archive; None reads it.
        reading: How images become pixels.
        skip_bad: Whether to leave out samples of a custom dataset whose labels cannot be read.
        context: Characters per window of text.
        task: The kind of labels, a key of `tasks.TASKS`; auto infers it, for tables and custom datasets.
        columns: The columns of a table.

    Raises:
        RefusedError: Data is missing, unreadable or inconsistent.
        UsageError: Images differ in size and `image_size` is None.
    """
    fixed = task in ("auto", "classes") or is_named_code(name) or is_table(name) or name.startswith(HF)
    rule(fixed, "task", task, f"auto or classes with --data {name}, whose labels are classes")
    if name == "digits":
        return _open_digits(image_size)
    if name == "text":
        return _open_text(directory, context)
    if is_named_code(name):
        folder = None if directory is None else os.fspath(directory)
        own = open_own(name, folder, image_size=image_size, reading=reading, skip_bad=skip_bad, task=task)
        return _from_own(own)
    if name.startswith(HF):
        made, notes = open_hub(name, columns)
        own = open_own(
            name,
            None,
            image_size=image_size,
            reading=reading,
            skip_bad=skip_bad,
            made=made,
            side_if_unequal=UNEQUAL_SIDE,
        )
        found = _from_own(own)
        return replace(found, notes=[*notes, *found.notes])
    root = root_of(name, directory)
    if name in ARCHIVES and is_folder(root / ARCHIVES[name].folder):
        read = read_archive(root, ARCHIVES[name]) if contents is None else contents
        train, test = (_from_array(name, *split, read.classes, image_size) for split in (read.train, read.test))
        return DataSplits(train=train, test=test)
    if name not in _STATISTICS and not is_table(name):
        raise UsageError(f"--data ({name}) must be one of {', '.join(_STATISTICS)}")
    folders = list_data(name, root, columns) if listed is None else listed
    assert folders is not None
    return _open_folders(name, root, image_size, folders, reading)


@lru_cache(maxsize=1)
def _open_digits(image_size: int | None) -> DataSplits:
    images, targets = digits_table()
    grey = np.round(images * (255 / 16)).astype(np.uint8).repeat(4, axis=1).repeat(4, axis=2)
    pixels = np.repeat(grey[:, None], 3, axis=1)
    everything = np.arange(len(pixels))
    sets = []
    for ids in split_held_out(targets, everything, fraction=0.2, seed=0):
        sets.append(_from_array("digits", pixels[ids], targets[ids].tolist(), tuple("0123456789"), image_size))
    return DataSplits(train=sets[0], test=sets[1])


def _open_text(directory: str | os.PathLike[str] | None, context: int) -> DataSplits:
    splits = split_text(directory, context=context)

    def split(source: TextSource) -> ImageSet:
        return ImageSet(
            name="text",
            classes=splits.characters,
            labels=torch.zeros(source.windows, dtype=torch.int64),
            mean=(0.0, 0.0, 0.0),
            std=(1.0, 1.0, 1.0),
            flips=False,
            source=source,
        )

    known = f"{plural(splits.length, 'character')}, {len(splits.characters)} different"
    note = f"text: {splits.name}, {known}; the last tenth is for testing"
    return DataSplits(train=split(splits.train), test=split(splits.test), notes=[note])


def _from_array(
    name: str, pixels: PixelArray, labels: Sequence[int], classes: tuple[str, ...], image_size: int | None
) -> ImageSet:
    side = None if image_size is None else min(image_size, *pixels.shape[2:])
    known = torch.tensor(labels, dtype=torch.int64)
    return _image_set(name, classes, known, ArraySource(pixels=pixels, side=side))


def _image_set(
    name: str, classes: tuple[str, ...], labels: Tensor, source: ArraySource | FileSource, kind: str = "classes"
) -> ImageSet:
    mean, std = _STATISTICS[name]
    flips = name != "digits"
    return ImageSet(
        name=name, classes=classes, labels=labels, mean=mean, std=std, flips=flips, source=source, kind=kind
    )


def _from_own(splits: dict[str, OwnSplit]) -> DataSplits:
    """Return the splits of a custom dataset with classes. Its numbers name classes without a name."""
    train, test = splits["train"], splits["test"]
    name = train.source.name
    if train.kind != "classes":
        return _from_own_rows(splits)
    shown = {part: {n for row, n in enumerate(s.labels.tolist()) if row not in s.broken} for part, s in splits.items()}
    used = sorted(shown["train"] | shown["test"]) or [0]
    if len(used) > MOST_CLASSES and 2 * len(used) > len(train.labels):
        raise RefusedError(
            f"--data ({name}): {len(train.labels)} training samples have {len(used)} different labels, "
            f"such as {first_few(list(map(str, used)))}; a class needs two samples or more"
        )
    classes, notes = train.classes or tuple(map(str, used)), list[str]()
    number = {label: place for place, label in enumerate(used)}
    if train.classes or used[-1] == len(used) - 1:
        number = {label: label for label in used}
    else:
        notes.append(
            f"labels are {first_few(list(classes))}: the "
            f"{plural(len(classes), 'class is', 'classes are')} renumbered from 0 and named by these labels"
        )
    alike = test.classes in (train.classes, None) and number[used[-1]] < len(classes)
    if not alike or len(set(classes)) < max(2, len(classes)) or not all(classes):
        raise RefusedError(
            f"--data ({name}) must have at least two classes with different names, none empty, the same "
            f"in train and test; labels go up to {used[-1]}, and train names "
            f"{plural(len(classes), 'class', 'classes')}"
        )
    unlearnt = [classes[number[label]] for label in sorted(shown["test"] - shown["train"])]
    if unlearnt:
        notes.append(f"no training sample has a class that the test set has: {first_few(unlearnt)}")
    unseen = [each for place, each in enumerate(classes) if place not in number.values()]
    if unseen:
        notes.append(
            f"no sample has one of {plural(len(unseen), 'class', 'classes')} that are named: {first_few(unseen)}"
        )
    # Labels of broken samples are placeholders.
    places = {part: [number.get(label, 0) for label in split.labels.tolist()] for part, split in splits.items()}
    return _joined(
        splits, classes, {part: torch.tensor(found, dtype=torch.int64) for part, found in places.items()}, notes
    )


def _from_own_rows(splits: dict[str, OwnSplit]) -> DataSplits:
    """Return the splits of a custom dataset with several labels per sample, or numbers."""
    train, test = splits["train"], splits["test"]
    name, outputs = train.source.name, train.labels.shape[1]
    names = train.classes or tuple(map(str, range(outputs)))
    alike = test.classes in (train.classes, None) and len(set(names)) == len(names) == outputs and all(names)
    if not alike:
        raise RefusedError(
            f"--data ({name}): classes must be {plural(outputs, 'different name')}, one for each entry of a label, "
            f"none empty, the same in train and test; train names {len(names)}"
        )
    found = _joined(splits, names, {part: split.labels for part, split in splits.items()}, [])
    return replace(found, notes=[*found.notes, *notes_on_absent({"train": found.train, "test": found.test})])


def _joined(
    splits: dict[str, OwnSplit], names: tuple[str, ...], labels: dict[str, Tensor], notes: list[str]
) -> DataSplits:
    """Return the splits of a custom dataset with the given names and labels."""
    train, (mean, std) = splits["train"], _STATISTICS["imagefolder"]
    sets = {
        part: ImageSet(
            name=HF if train.source.name.startswith(HF) else train.source.name,
            classes=names,
            labels=labels[part],
            mean=mean,
            std=std,
            flips=train.flips,
            source=split.source,
            broken=split.broken,
            kind=train.kind,
            weights=split.weights,
        )
        for part, split in splits.items()
    }
    said = [*train.notes, *splits["test"].notes, *notes]
    return DataSplits(train=sets["train"], test=sets["test"], notes=said)


def _open_folders(data: str, root: Path, image_size: int | None, folders: Folders, reading: Reading) -> DataSplits:
    listings, name = folders.listings, "imagefolder" if is_table(data) else data
    num_classes = len(listings["train"].classes)
    if name in ARCHIVES and num_classes != ARCHIVES[name].num_classes:
        raise RefusedError(
            f"{root} holds {plural(num_classes, 'class', 'classes')} where {name} has {ARCHIVES[name].num_classes}; "
            "use --data imagefolder for other images"
        )
    shape, side, cut = folders.sizes.one_shape(image_size, fit=reading.fit)
    sets = {}
    for part in ("train", "test"):
        listing = listings[part]
        source = FileSource(
            root=listing.root,
            paths=listing.paths,
            num_bytes=listing.num_bytes,
            local=folders.local[part],
            image_shape=shape,
            side=side,
            reading=reading,
            oblong=folders.sizes.oblong,
        )
        weights = None if listing.weights is None or part == "test" else torch.from_numpy(listing.weights)
        own = _image_set(name, listing.classes, listing.labels(), source, listing.kind)
        sets[part] = replace(own, weights=weights)
    return DataSplits(train=sets["train"], test=sets["test"], notes=[*folders.notes, *cut, *notes_on_absent(sets)])


def notes_on_absent(sets: Mapping[str, ImageSet]) -> list[str]:
    """Return notes on labels that no training or no test sample has."""
    notes = []
    for part, image_set in sets.items():
        present = image_set.task.present(image_set.labels[torch.from_numpy(image_set.ids)])
        if image_set.kind == "labels" and not present.all():
            lacking = [image_set.classes[place] for place in (~present).nonzero().flatten()]
            notes.append(f"no {part}{'ing' if part == 'train' else ''} sample has label {first_few(lacking)}")
    return notes
