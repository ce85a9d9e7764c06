"""Class folders on disk: which image files make up which split, in the order that gives samples their ids.

One pass over a tree, which reads every folder and asks once for each file's size and time, tells all that is needed of
it: 1.28 million files take half a minute on a network file system. Ranks of a node share one rank's; see `Folders`.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvfreeze.data.images import SUFFIXES, digest_of_files
from hvfreeze.data.reading import open_image, shown_size, unreadable
from hvfreeze.data.shards import Ids, evenly, split_validation
from hvfreeze.errors import RefusedError
from hvfreeze.wording import plural

SPLITS = ("train", "val", "test")
MOST_SUFFIXES = 8
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
    num_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """The size of each file, in the same order."""
    times: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """When each was last changed, in nanoseconds; empty for a listing from another rank."""
    notes: tuple[str, ...] = ()
    """What the user should know of files that are passed over."""

    def labels(self) -> list[int]:
        """Return the class of every path, an index into `classes`."""
        label_of = {name: label for label, name in enumerate(self.classes)}
        return [label_of[path.partition("/")[0]] for path in self.paths]

    def chosen(self, rows: Ids) -> Listing:
        """Return the listing of some of its images."""
        paths = tuple(self.paths[row] for row in rows)
        return replace(self, paths=paths, num_bytes=self.num_bytes[rows], times=self.times[rows])

    def sizes(self) -> dict[tuple[int, int], Path]:
        """Return the distinct (height, width) of at most 64 evenly spaced images, each with one of its files.

        One that cannot be read says nothing here: whoever loads the pixels tells of all of them. Raises RefusedError
        where none of them is an image.
        """
        found: dict[tuple[int, int], Path] = {}
        refusal: RefusedError | None = None
        for row in evenly(np.arange(len(self.paths)), _PROBES):
            path = self.root / self.paths[row]
            try:
                with open_image(path) as image:
                    found.setdefault(shown_size(image), path)
            except RefusedError as error:
                refusal = refusal or error
        if refusal is not None and not found:
            raise refusal
        return found


@dataclass(frozen=True, kw_only=True)
class Folders:
    """All that a rank must know of a tree before it reads pixels."""

    root: Path
    listings: dict[str, Listing]
    """By split: train, test, and val where there are all three."""
    notes: list[str]
    sizes: dict[tuple[int, int], str]
    """Distinct (height, width) of a few images, each with the path of one."""
    local: dict[str, str]
    """By split, a digest of when its files were changed on this machine."""

    def digest(self) -> str:
        """Return the SHA-256 over splits, classes, paths and sizes, equal for equal trees on other machines."""
        parts = [(n, each.classes, digest_of_files(each.paths, each.num_bytes)) for n, each in self.listings.items()]
        return hashlib.sha256(repr((parts, self.sizes.keys())).encode()).hexdigest()

    def to_send(self) -> Folders:
        """Return what another rank is to be sent."""
        nothing = np.zeros(0, np.int64)
        return replace(self, listings={name: replace(each, times=nothing) for name, each in self.listings.items()})

    def here(self, root: Path, local: Mapping[str, str]) -> Folders:
        """Return the same for a rank that has an equal tree at `root`, with the digests `local` of its machine."""
        below = {name: each.root.relative_to(self.root) for name, each in self.listings.items()}
        moved = {name: replace(each, root=root / below[name]) for name, each in self.listings.items()}
        return replace(self, root=root, listings=moved, local=dict(local))


def list_folders(root: Path) -> Folders:
    """Return what there is below `root`, by one pass over it.

    Raises RefusedError as `find_splits` does, and where one of the images that are looked at is none.
    """
    listings, notes = find_splits(root)
    sizes = {size: str(path) for listing in listings.values() for size, path in listing.sizes().items()}
    local = {name: hashlib.sha256(each.times.tobytes()).hexdigest() for name, each in listings.items()}
    return Folders(root=root, listings=listings, notes=notes, sizes=sizes, local=local)


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder. Raises RefusedError where the folders above it cannot be read."""
    try:
        return path.is_dir()
    except OSError as error:
        raise unreadable(path, error) from error


def absence_of(folder: Path) -> str:
    """Return what is wrong with the path of what `is_folder` does not find."""
    return "is no folder" if os.path.lexists(folder) else "does not exist"


def scan(root: Path, *, fewest: int = 2) -> Listing:
    """Return all images below `root`, whose folders are the classes; sub-folders of a class belong to it.

    Names that begin with a dot, files that are no images by their suffix, and files that lie in no class folder are
    passed over; notes tell of the latter two. Raises RefusedError where the folder is missing, unreadable or empty,
    holds fewer than `fewest` classes, or a class has no image.
    """
    entries = _entries(root)
    classes = [name for name, folder in entries if folder]
    loose = sum(name.lower().endswith(SUFFIXES) for name, folder in entries if not folder)
    lie = plural(loose, "image lies in no class folder and is", "images lie in no class folder and are")
    beside = [f"{root}: {lie} passed over"] if loose else []
    others: Counter[str] = Counter(suffix_of(name) for name, folder in entries if not folder)
    for suffix in SUFFIXES:
        del others[suffix]
    if not classes:
        count = plural(fewest, "class", "classes")
        raise RefusedError(f"{root} holds no class folders; expected {root}/CLASS/IMAGE for at least {count}")
    found: list[Image] = []
    for name in classes:
        unknown: Counter[str] = Counter()
        inside = files_below(root / name, unknown)
        if not inside:
            raise RefusedError(
                f"class folder {root / name} holds no image ({', '.join(SUFFIXES)}){told_of(unknown, ' but ')}; add "
                "images or remove the folder"
            )
        others += unknown
        found += [(f"{name}/{path}", size, time) for path, size, time in inside]
    if len(classes) < fewest:
        raise RefusedError(f"{root} holds one class only ({classes[0]}); training needs at least two class folders")
    found.sort(key=lambda image: os.fsencode(image[0]))
    paths, sizes, times = zip(*found, strict=True)
    return Listing(
        root=root,
        classes=tuple(sorted(classes, key=os.fsencode)),
        paths=paths,
        num_bytes=np.array(sizes, np.int64),
        times=np.array(times, np.int64),
        notes=(*notes_on_others(root, others), *beside),
    )


def suffix_of(name: str) -> str:
    """Return a file name's suffix in small letters, or what to call it where there is none."""
    return os.path.splitext(name)[1].lower() or "no suffix"


def told_of(others: Mapping[str, int], before: str) -> str:
    """Return how many files of which suffixes there are, the most frequent first; nothing where there are none."""
    each = sorted(others.items(), key=lambda found: (-found[1], found[0]))
    more = len(each) - MOST_SUFFIXES
    shown = ", ".join(f"{suffix} ({count})" for suffix, count in each[:MOST_SUFFIXES])
    return (
        f"{before}{shown}" + (f" and {plural(more, 'more suffix', 'more suffixes')}" if more > 0 else "")
        if each
        else ""
    )


def notes_on_others(folder: Path, others: Mapping[str, int]) -> list[str]:
    """Return what the user should know of files that are passed over as they are no images by their suffix."""
    count = sum(others.values())
    if count == 0:
        return []
    files = plural(count, "file is passed over, no image by its", "files are passed over, no images by their")
    return [f"{folder}: {files} suffix: {told_of(others, '')}"]


def images_below(folder: Path, others: Counter[str]) -> list[str]:
    """Return the images in a folder and its sub-folders, relative to it and sorted as bytes, as `scan` sees them.

    Counts in `others` the files that are passed over, by suffix. Raises RefusedError as `files_below` does.
    """
    return sorted((path for path, *_ in files_below(folder, others)), key=os.fsencode)


Image = tuple[str, int, int]
"""A file's path, its size in bytes, and when it was last changed, in nanoseconds."""


def files_below(folder: Path, others: Counter[str]) -> list[Image]:
    """Return the images in a folder and its sub-folders, in any order; each file's size and time are asked for once.

    Counts in `others` the files that are passed over, by suffix. Raises RefusedError where a folder cannot be read, or
    is a link to one that it lies in.
    """
    images: list[Image] = []
    pending = [""]
    while pending:
        parent = pending.pop()
        try:
            with os.scandir(folder / parent) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if leads_to_folder(entry):
                        if entry.is_symlink():
                            refuse_circle(folder, f"{parent}{entry.name}")
                        pending.append(f"{parent}{entry.name}/")
                    elif entry.name.lower().endswith(SUFFIXES):
                        images.append((f"{parent}{entry.name}", *size_and_time(entry)))
                    else:
                        others[suffix_of(entry.name)] += 1
        except OSError as error:
            raise unreadable(Path(error.filename or folder / parent), error) from error
    return images


def leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; a link that leads nowhere, or to itself, is a file."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def refuse_circle(folder: Path, link: str) -> None:
    """Raise RefusedError where a link leads to a folder that it lies in: its images would come again and again.

    `link` is relative to `folder`.
    """
    target = os.path.realpath(folder / link)
    above = (os.path.realpath(folder / parent) for parent in Path(link).parents)
    if any(os.path.commonpath((place, target)) == target for place in above):
        raise RefusedError(f"{folder / link} is a link to {target}, in which it lies itself; remove it")


def size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Return a file's size in bytes and when it was changed, 0 and 0 where it cannot be looked at.

    So is a link to a file that is gone. It is an image that cannot be used, which whoever reads it tells of by name.
    """
    try:
        status = entry.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def find_splits(root: Path) -> tuple[dict[str, Listing], list[str]]:
    """Return the listings `train`, `test` and, where there are train, val and test, `val`; and notes for the user."""
    present = [part for part in SPLITS if is_folder(root / part)]
    if not present:
        return _hold_out(scan(root))
    if "train" not in present or len(present) == 1:
        raise RefusedError(
            f"{root} holds {' and '.join(present)} alone; it must hold train/ with test/ or val/, or class folders only"
        )
    listings = {part: scan(root / part) for part in present}
    notes = [note for listing in listings.values() for note in listing.notes]
    for listing in listings.values():
        for here, there in ((listings["train"], listing), (listing, listings["train"])):
            odd = sorted(set(here.classes) - set(there.classes))
            if odd:
                raise RefusedError(
                    f"class folder {here.root / odd[0]} is missing in {there.root}; both must hold the same classes"
                )
    if "test" in listings:
        unused = [f"{root / 'val'} is not used: accuracy is on {root / 'test'}"] if "val" in listings else []
        return listings, [*unused, *notes]
    return {"train": listings["train"], "test": listings["val"]}, [f"{root / 'val'} serves as the test set", *notes]


def _hold_out(everything: Listing) -> tuple[dict[str, Listing], list[str]]:
    total = len(everything.paths)
    if total < 2 * len(everything.classes):
        raise RefusedError(
            f"{everything.root} holds {plural(total, 'image')}, too few to hold out a test set; bring train/ and test/ "
            "folders"
        )
    fraction = max(_HOLD_OUT_FRACTION, 1 / total)
    kept, held = split_validation(everything.labels(), np.arange(total), fraction=fraction, seed=_HOLD_OUT_SEED)
    train, test = (everything.chosen(ids) for ids in (kept, held))
    note = f"{everything.root} has class folders only: a fixed {_HOLD_OUT_FRACTION:.0%} of each class is the test set"
    return {"train": train, "test": test}, [f"{note}, {len(held)} of {total} images", *everything.notes]


def _entries(folder: Path) -> list[tuple[str, bool]]:
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, leads_to_folder(entry)) for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise unreadable(folder, error) from error
