"""Class folders on disk: the image files of each split, in the order of the sample ids.

One pass reads every folder and each file's size and time: 1.28 million files take half a minute on a network file
system. One rank per node lists the tree for the others; see `Folders`.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.data.images import SUFFIXES, digest_of_files
from hvfreeze.data.reading import CONVERT_DICOM, DICOM_SUFFIXES, open_image, shown_size, unreadable
from hvfreeze.data.shards import Ids, split_held_out
from hvfreeze.data.sizes import ImageSizes, Size
from hvfreeze.data.split_names import SPELLINGS, find_split_folders, split_of
from hvfreeze.errors import RefusedError
from hvfreeze.tasks import TASKS, Task
from hvfreeze.wording import first_few, plural

HELD_OUT = 0.1
"""Share of the images that is the test set of data without splits."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of one split. A sample's id is its index in `paths`."""

    root: Path
    classes: tuple[str, ...]
    """Folder names sorted as bytes."""
    paths: tuple[str, ...]
    """CLASS/.../IMAGE relative to `root`, sorted as bytes; see `meant_by` for how CLASS is written."""
    num_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """The size of each file, in the same order."""
    times: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Modification time of each file in nanoseconds; empty for a listing from another rank."""
    notes: tuple[str, ...] = ()
    """Log lines on files that are skipped."""
    given: NDArray[np.generic] | None = None
    """The labels of the paths, in the task's form; None: each path's class is its folder."""
    kind: str = "classes"
    """The kind of labels, a key of `tasks.TASKS`."""
    weights: NDArray[np.float64] | None = None
    """Sample weights of the paths, at least 0; None means equal weights."""

    def labels(self) -> Tensor:
        """Return the labels of the paths; a class is an index into `classes`."""
        if self.given is not None:
            return torch.from_numpy(self.given)
        label_of = {meant_by(name): label for label, name in enumerate(self.classes)}
        folders = {path.partition("/")[0] for path in self.paths}
        labels = {name: label_of[meant_by(name)] for name in folders}
        return torch.tensor([labels[path.partition("/")[0]] for path in self.paths], dtype=torch.int64)

    def chosen(self, rows: Ids) -> Listing:
        """Return the listing of a subset of the images."""
        paths = tuple(self.paths[row] for row in rows)
        sizes, times = self.num_bytes[rows], self.times[rows]
        given = None if self.given is None else self.given[rows]
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, paths=paths, num_bytes=sizes, times=times, given=given, weights=weights)

    def size_of(self, row: int) -> tuple[Size, str]:
        """Return the size of an image, and its file; reads the header only.

        Raises:
            RefusedError: the file is unreadable or not an image.
        """
        path = self.root / self.paths[row]
        with open_image(path) as image:
            return shown_size(image), str(path)


@dataclass(frozen=True, kw_only=True)
class Folders:
    """The listing of a tree: all that a rank needs before it reads pixels."""

    root: Path
    listings: dict[str, Listing]
    """Listings of the splits train and test."""
    notes: list[str]
    sizes: ImageSizes
    local: dict[str, str]
    """Digest of the modification times on this machine, per split."""

    def digest(self) -> str:
        """Return the SHA-256 over splits, labels, paths and sizes; equal trees give equal digests on every machine."""
        parts = [
            (
                *(name, each.classes, digest_of_files(each.paths, each.num_bytes), each.kind),
                *(hashlib.sha256(own.tobytes()).hexdigest() for own in (each.given, each.weights) if own is not None),
            )
            for name, each in self.listings.items()
        ]
        return hashlib.sha256(repr((parts, list(self.sizes.counts))).encode()).hexdigest()

    def to_send(self) -> Folders:
        """Return the listing in the form that is sent to other ranks."""
        nothing = np.zeros(0, np.int64)
        return replace(self, listings={name: replace(each, times=nothing) for name, each in self.listings.items()})

    def here(self, root: Path, local: Mapping[str, str]) -> Folders:
        """Return the listing for a rank with an equal tree at `root` and the digests `local` of its machine."""
        below = {name: each.root.relative_to(self.root) for name, each in self.listings.items()}
        moved = {name: replace(each, root=root / below[name]) for name, each in self.listings.items()}
        return replace(self, root=root, listings=moved, local=dict(local))


def list_folders(root: Path) -> Folders:
    """List the tree below `root` in one pass.

    Raises:
        RefusedError: as `find_splits`, or a probed file is not an image.
    """
    return folders_of(root, *find_splits(root))


def folders_of(root: Path, listings: dict[str, Listing], notes: list[str]) -> Folders:
    """Return the listing of a tree from the listings of its splits, after reading the headers of a few images.

    Raises:
        RefusedError: a probed file is not an image.
    """
    sizes = ImageSizes()
    for listing in listings.values():
        sizes.probe(len(listing.paths), listing.size_of)
    local = {name: hashlib.sha256(each.times.tobytes()).hexdigest() for name, each in listings.items()}
    return Folders(root=root, listings=listings, notes=notes, sizes=sizes, local=local)


def is_folder(path: Path) -> bool:
    """Return True if `path` is a folder. Raises RefusedError if the folders above it cannot be read."""
    try:
        return path.is_dir()
    except OSError as error:
        raise unreadable(path, error) from error


def absence_of(folder: Path) -> str:
    """Return why `is_folder` is False: no folder, or missing."""
    return "is not a folder" if os.path.lexists(folder) else "does not exist"


SYSTEM_FOLDERS = frozenset(
    {
        "#recycle",
        "#snapshot",
        "$recycle.bin",
        "@eadir",
        "@recently-snapshot",
        "@recycle",
        "@tmp",
        "__macosx",
        "__pycache__",
        "lost+found",
        "recycler",
        "system volume information",
    }
)
"""Folders in which storage systems and archives keep thumbnails, old versions and removed files."""


@dataclass
class PassedOver:
    """Counts of the files and folders that are skipped below a folder."""

    suffixes: Counter[str] = field(default_factory=Counter)
    """Number of files per suffix that is not an image's."""
    system: Counter[str] = field(default_factory=Counter)
    """Names of `SYSTEM_FOLDERS`."""

    def add(self, other: PassedOver) -> None:
        """Add the counts of another one."""
        self.suffixes += other.suffixes
        self.system += other.system

    def in_words(self, before: str) -> str:
        """Return the number of files per suffix, the most frequent first; empty if there are none."""
        each = sorted(self.suffixes.items(), key=lambda found: (-found[1], found[0]))
        shown = first_few([f"{suffix} ({count})" for suffix, count in each])
        dicom = f" ({CONVERT_DICOM})" if self.suffixes.keys() & set(DICOM_SUFFIXES) else ""
        return f"{before}{shown}{dicom}" if each else ""

    def notes(self, folder: Path) -> list[str]:
        """Return log lines on skipped files."""
        notes, count = list[str](), sum(self.suffixes.values())
        if count:
            files = plural(count, "file skipped, not an image by its", "files skipped, not images by their")
            notes.append(f"{folder}: {files} suffix: {self.in_words('')}")
        if self.system:
            folders = plural(sum(self.system.values()), "system folder", "system folders")
            notes.append(f"{folder}: {folders} skipped: {', '.join(sorted(self.system))}")
        return notes


def scan(root: Path, *, fewest: int = 2, of_test: bool = False) -> Listing:
    """Return all images below `root`, whose folders are the classes; sub-folders of a class belong to it.

    Skips hidden names, `SYSTEM_FOLDERS`, files that are not images by their suffix, and files outside class folders;
    notes report all but the hidden ones. A class folder without an image is skipped with `of_test`, else refused.

    Raises:
        RefusedError: the folder is missing, unreadable or empty, or holds fewer than `fewest` classes; two class names
            look equal; or the folders are splits, see `refuse_splits`.
    """
    passed = PassedOver()
    names, files = ([entry.name for entry in entries] for entries in _entries(root, passed))
    loose = sum(map(is_image, files))
    passed.suffixes.update(suffix_of(name) for name in files if not is_image(name))
    if not names:
        count = plural(fewest, "class", "classes")
        raise RefusedError(f"{root} holds no class folders; expected {root}/CLASS/IMAGE for at least {count}")
    refuse_equal_looks(root, names)
    found: dict[str, list[Image]] = {}
    for name in names:
        inside = PassedOver()
        found[name] = files_below(root / name, inside)
        if not found[name] and not of_test:
            raise RefusedError(
                f"class folder {root / name} holds no image ({', '.join(SUFFIXES)}){inside.in_words(' but ')}; add "
                "images or remove the folder"
            )
        passed.add(inside)
    classes = [name for name in names if found[name]]
    if not classes:
        raise RefusedError(f"{root} holds no image ({', '.join(SUFFIXES)}) in its class folders; add images")
    if len(classes) < fewest:
        only = classes[0]
        within = sorted({path.partition("/")[0] for path, *_ in found[only] if "/" in path})
        hint = f"; if its folders ({first_few(within)}) are the classes, name {root / only} instead of {root}"
        raise RefusedError(
            f"{root} holds one class only ({only}); training needs at least two class folders"
            + (hint if len(within) > 1 else "")
        )
    refuse_splits(root, {name: [path for path, *_ in found[name]] for name in classes})
    images = [(f"{name}/{path}", size, time) for name in classes for path, size, time in found[name]]
    images.sort(key=lambda image: os.fsencode(image[0]))
    paths, sizes, times = zip(*images, strict=True)
    outside = plural(loose, "image outside class folders", "images outside class folders")
    return Listing(
        root=root,
        classes=tuple(sorted(classes, key=os.fsencode)),
        paths=paths,
        num_bytes=np.array(sizes, np.int64),
        times=np.array(times, np.int64),
        notes=(*passed.notes(root), *([f"{root}: {outside} skipped"] if loose else [])),
    )


def refuse_splits(root: Path, paths: Mapping[str, Sequence[str]]) -> None:
    """Raise RefusedError if folders look like splits: without images, and all with the same sub-folders.

    Splits, folds and several datasets look like this; their sub-folders are the classes. A single sub-folder, as in
    CLASS/images/, is accepted. `paths` are each folder's images, relative to it.
    """
    inside = [{path.partition("/")[0] for path in images if "/" in path} for images in paths.values()]
    shared = sorted(set.intersection(*inside))
    if len(paths) > 1 and len(shared) > 1 and not any("/" not in path for images in paths.values() for path in images):
        raise RefusedError(
            f"{root} holds {first_few(sorted(paths))}, which hold no images themselves, but the same "
            f"folders ({first_few(shared)}): they look like splits, not classes; rename splits to "
            f"train/ and test/, name one dataset with --data-dir, or move the images of each "
            f"class into its folder"
        )


def meant_by(name: str) -> str:
    """Return a name in Unicode normal form, in which composed and decomposed accents are equal."""
    return unicodedata.normalize("NFC", name)


def looks_of(name: str) -> str:
    """Return a key that is equal for names which look alike."""
    letters = unicodedata.normalize("NFKC", name).casefold()
    return " ".join("".join(letter for letter in letters if unicodedata.category(letter) != "Cf").split())


def refuse_equal_looks(root: Path, names: Sequence[str]) -> None:
    """Raise RefusedError if two folder names are equal in Unicode normal form."""
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(meant_by(name), name)
        if other != name:
            raise RefusedError(
                f"{root} holds two class folders that look equal: {other!a} and {name!a}, whose accents are "
                "composed and decomposed; move the images of one into the other"
            )


def with_classes_of(test: Listing, train: Listing) -> Listing:
    """Return the test set with the classes of the training set; a note names classes without test images.

    Raises:
        RefusedError: the test set has a class that the training set lacks.
    """
    known = {meant_by(name): name for name in train.classes}
    odd = [name for name in test.classes if meant_by(name) not in known]
    if odd:
        alike = [name for name in train.classes if looks_of(name) == looks_of(odd[0])]
        hint = f", which has {alike[0]!a} instead of {odd[0]!a}; rename one" if alike else ""
        raise RefusedError(
            f"class folder {test.root / odd[0]} is missing in {train.root}"
            + (hint or "; add training images of that class, or remove its folder from the test set")
        )
    tested = set(map(meant_by, test.classes))
    absent = [name for name in train.classes if meant_by(name) not in tested]
    notes = test.notes
    if absent:
        each = plural(len(absent), "class", "classes")
        notes += (f"{test.root} has no image of {each} ({first_few(absent)}): accuracy does not cover them",)
    return replace(test, classes=train.classes, notes=notes)


def first_image(folder: Path) -> Path | None:
    """Return an image in `folder` or two levels below it; None if there is none among the first 10,000 entries."""
    left, seen = deque([(folder, 3)]), 0
    while left:
        here, levels = left.popleft()
        with suppress(OSError), os.scandir(here) as entries:
            for entry in entries:
                seen += 1
                if seen > 10_000:
                    return None
                if entry.name.startswith("."):
                    continue
                if not entry.is_dir():
                    if is_image(entry.name):
                        return Path(entry.path)
                elif levels > 1:
                    left.append((Path(entry.path), levels - 1))
    return None


def class_folder_of(path: Path, root: Path) -> Path | None:
    """Return the folder of classes, `root` or a split in it, in which `path` is or would be; None if it is in none.

    None also for data that cannot be read, which is refused later.
    """
    root, path = root.resolve(), path.resolve()
    if not path.is_relative_to(root):
        return None
    try:
        splits = splits_in(root).values()
    except RefusedError:
        return None
    if not splits or path == root:
        return root
    return next((folder for folder in splits if path.is_relative_to(folder)), None)


def is_image(name: str) -> bool:
    """Return True if a file name has an image's suffix."""
    return name.lower().endswith(SUFFIXES)


def suffix_of(name: str) -> str:
    """Return a file name's suffix in lower case, or a placeholder if there is none."""
    return os.path.splitext(name)[1].lower() or "no suffix"


def images_below(folder: Path, passed: PassedOver) -> list[str]:
    """Return the images in a folder and its sub-folders, relative to it and sorted as bytes.

    Adds skipped files to `passed`. Raises RefusedError like `files_below`.
    """
    return sorted((path for path, *_ in files_below(folder, passed)), key=os.fsencode)


Image = tuple[str, int, int]
"""A file's path, its size in bytes, and its modification time in nanoseconds."""


def files_below(folder: Path, passed: PassedOver) -> list[Image]:
    """Return the images in a folder and its sub-folders, in any order, with one system call per file.

    Adds skipped files to `passed`.

    Raises:
        RefusedError: a folder cannot be read, or links to a folder above it.
    """
    images: list[Image] = []
    pending = [""]
    while pending:
        parent = pending.pop()
        inside, files = _entries(folder / parent, passed)
        for entry in inside:
            if entry.is_symlink():
                refuse_circle(folder, f"{parent}{entry.name}")
            pending.append(f"{parent}{entry.name}/")
        for entry in files:
            if is_image(entry.name):
                images.append((f"{parent}{entry.name}", *size_and_time(entry)))
            else:
                passed.suffixes[suffix_of(entry.name)] += 1
    return images


def leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """Return True if an entry is a folder or a link to one; a broken link, or one to itself, is a file."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def refuse_circle(folder: Path, link: str) -> None:
    """Raise RefusedError if a link leads to a folder above it, which would repeat its images without end.

    `link` is relative to `folder`.
    """
    target = os.path.realpath(folder / link)
    above = (os.path.realpath(folder / parent) for parent in Path(link).parents)
    if any(os.path.commonpath((place, target)) == target for place in above):
        raise RefusedError(f"{folder / link} is a link to {target}, a folder above it; remove it")


def size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Return a file's size in bytes and its modification time; 0 and 0 if the file is not accessible.

    A broken link is one example. Loading the pixels reports it as an unreadable image.
    """
    try:
        status = entry.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def splits_in(root: Path) -> dict[str, Path]:
    """Return the folders of the splits in `root`, by split (`train`, `val`, `test`); empty if the folders are classes.

    Raises:
        RefusedError: `root` cannot be read, or several folders name the same split.
    """
    return _splits_among(root, [folder.name for folder in _entries(root, PassedOver())[0]])


def _splits_among(root: Path, names: Sequence[str]) -> dict[str, Path]:
    def holds_images(name: str) -> bool:
        return any(is_image(file.name) for file in _entries(root / name, PassedOver())[1])

    found = find_split_folders(root, names, holds_images)
    return {split: root / found[split] for split in SPELLINGS if split in found}


def test_set_beside(root: Path) -> str:
    """Return how to use the test images next to `root`, a folder of training images; empty if there are none."""
    here, found = root.resolve(), list[str]()
    if split_of(here.name) == ("train", ""):
        with suppress(OSError):
            found = [name for name in os.listdir(here.parent) if split_of(name) in (("test", ""), ("val", ""))]
    return f" (to use the test images in {min(found)}, give {here.parent})" if found else ""


def find_splits(root: Path) -> tuple[dict[str, Listing], list[str]]:
    """Return the listings `train` and `test`, and notes for the user."""
    passed = PassedOver()
    folders = [folder.name for folder in _entries(root, passed)[0]]
    splits = _splits_among(root, folders)
    if not splits:
        return hold_out(scan(root), f"{root} has class folders only{test_set_beside(root)}")
    names = [folder.name for folder in splits.values()]
    if "train" not in splits or len(splits) == 1:
        raise RefusedError(
            f"{root} holds {' and '.join(names)} only; it must hold train/ with test/ or val/, or class folders only"
        )
    notes, tested = list[str](), splits["test" if "test" in splits else "val"]
    if "val" in splits:
        used = f"is not used: accuracy is measured on {tested}" if "test" in splits else "serves as the test set"
        notes.append(f"{splits['val']} {used}")
    others = sorted(set(folders) - set(names))
    if others:
        notes.append(f"{root}: folders other than the splits are skipped: {first_few(others)}")
    train = scan(splits["train"])
    test = with_classes_of(scan(tested, fewest=1, of_test=True), train)
    return {"train": train, "test": test}, [*notes, *passed.notes(root), *train.notes, *test.notes]


def hold_out(everything: Listing, why: str) -> tuple[dict[str, Listing], list[str]]:
    """Return a training and a test set, a fixed share of the images of each class, and notes with the reason `why`.

    Raises:
        RefusedError: there are too few images.
    """
    task = TASKS[everything.kind](len(everything.classes))
    kept, held, note = held_out_rows(task, everything.labels(), why)
    train, test = (replace(everything.chosen(ids), notes=()) for ids in (kept, held))
    return {"train": train, "test": test}, [note, *everything.notes]


def held_out_rows(task: Task, labels: Tensor, why: str) -> tuple[Ids, Ids, str]:
    """Return the rows of a training and of a test set, a fixed share of each class, and a note with the reason `why`.

    Raises:
        RefusedError: there are too few rows.
    """
    total = len(labels)
    too_few = RefusedError(f"{why}: {plural(total, 'image')} are too few to hold out a test set; provide a test set")
    if total < 2 * task.outputs:
        raise too_few
    fraction = max(HELD_OUT, 1 / total)
    strata = task.strata(labels).numpy()
    kept, held = split_held_out(strata, np.arange(total), fraction=fraction, seed=0)
    if len(held) == 0:
        # Of up to 10 different numbers, each is a stratum of its own.
        raise too_few
    each = " of each class" if task.kind == "classes" else ""
    note = f"{why}: a fixed {HELD_OUT:.0%}{each} is the test set, {len(held)} of {total} images"
    return kept, held, note


def _entries(folder: Path, passed: PassedOver) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Return the folders and the files in a folder, without hidden and system entries.

    Adds the system folders to `passed`. Raises RefusedError if the folder cannot be read.
    """
    folders, files = list[os.DirEntry[str]](), list[os.DirEntry[str]]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if not leads_to_folder(entry):
                    files.append(entry)
                elif entry.name.lower() in SYSTEM_FOLDERS:
                    passed.system[entry.name] += 1
                else:
                    folders.append(entry)
    except OSError as error:
        raise unreadable(folder, error) from error
    return folders, files
