"""CIFAR-10 and CIFAR-100 from the archives that torchvision unpacks, read without executing pickled code."""

from __future__ import annotations

import io
import pickle
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hvfreeze.data.reading import PixelArray
from hvfreeze.errors import RefusedError


@dataclass(frozen=True, kw_only=True)
class Archive:
    """File and key names inside an unpacked archive."""

    folder: str
    dataset: str
    """The torchvision class that downloads the archive."""
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels_key: str
    classes_key: str
    num_classes: int


ARCHIVES = {
    "cifar10": Archive(
        folder="cifar-10-batches-py",
        dataset="CIFAR10",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test=("test_batch",),
        meta="batches.meta",
        labels_key="labels",
        classes_key="label_names",
        num_classes=10,
    ),
    "cifar100": Archive(
        folder="cifar-100-python",
        dataset="CIFAR100",
        train=("train",),
        test=("test",),
        meta="meta",
        labels_key="fine_labels",
        classes_key="fine_label_names",
        num_classes=100,
    ),
}


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler for containers, text, numbers and numpy arrays that refuses every other name."""

    # Taken from numpy's own pickles: its home has moved from numpy.core to numpy._core.
    _reconstruct = np.empty(0, dtype=np.uint8).__reduce__()[0]
    _known: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which image data never needs")
        return self._known[module, name]


def _read_pickle(path: Path, *keys: str) -> list[Any]:
    try:
        # The archives were written by Python 2, whose strings are bytes.
        content = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        return [content[key] for key in keys]
    except OSError as error:
        raise RefusedError(f"{path} cannot be read ({error.strerror}); unpack the archive again") from error
    # A damaged pickle can raise nearly any error.
    except Exception as error:
        raise RefusedError(
            f"{path} is not an intact CIFAR file ({type(error).__name__}: {error}); unpack the archive again"
        ) from error


IMAGE_SHAPE = (3, 32, 32)


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of an archive: class names, and per split (N, 3, 32, 32) uint8 pixels and N labels."""

    classes: tuple[str, ...]
    train: tuple[PixelArray, list[int]]
    test: tuple[PixelArray, list[int]]


def read_archive(directory: Path, archive: Archive) -> Contents:
    """Return the contents of an archive.

    Raises:
        RefusedError: a file is missing or damaged, or asks to run code; names the file.
    """
    classes = read_classes(directory, archive)
    splits = []
    for names in (archive.train, archive.test):
        parts = [read_images(directory, archive, name) for name in names]
        splits.append((np.concatenate([pixels for pixels, _ in parts]), [n for _, labels in parts for n in labels]))
    return Contents(classes, *splits)


def read_classes(directory: Path, archive: Archive) -> tuple[str, ...]:
    """Return the class names. Raises RefusedError like `read_archive`."""
    path = directory / archive.folder / archive.meta
    (classes,) = _read_pickle(path, archive.classes_key)
    if not isinstance(classes, list) or len(classes) != archive.num_classes:
        raise RefusedError(f"{path} does not hold {archive.num_classes} class names; unpack it again")
    return tuple(str(name) for name in classes)


def read_images(directory: Path, archive: Archive, name: str) -> tuple[PixelArray, list[int]]:
    """Return the (N, 3, 32, 32) uint8 pixels and N labels of one file. Raises RefusedError like `read_archive`."""
    path = directory / archive.folder / name
    data, labels = _read_pickle(path, "data", archive.labels_key)
    if not _is_batch(data, labels, num_classes=archive.num_classes):
        raise RefusedError(f"{path} does not hold 3x32x32 images with labels; unpack the archive again")
    return data.reshape(-1, *IMAGE_SHAPE), labels


def _is_batch(data: object, labels: object, *, num_classes: int) -> bool:
    return (
        isinstance(data, np.ndarray)
        and isinstance(labels, list)
        and data.dtype == np.uint8
        and data.shape == (len(labels), 3072)
        and all(isinstance(label, int) and 0 <= label < num_classes for label in labels)
    )


def download(directory: Path, archive: Archive) -> None:
    """Download and unpack an archive into `directory`, completely or not at all.

    Raises:
        RefusedError: there is no network, or the directory is not writable.
    """
    # torchvision offers no timeout, and a network that swallows packets would block every rank for minutes.
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        from hvfreeze.torchvision_shim import torchvision

        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".download-") as scratch:
            getattr(torchvision.datasets, archive.dataset)(scratch, download=True)
            (Path(scratch) / archive.folder).rename(directory / archive.folder)
    except (ImportError, OSError, RuntimeError) as error:
        if (directory / archive.folder).is_dir():
            return
        raise RefusedError(
            f"{archive.dataset} is not in {directory} and cannot be downloaded ({error}); put {archive.folder}/ or "
            "train/CLASS/ and test/CLASS/ folders there, name another folder with --data-dir or $HVFREEZE_DATA, "
            "or use --data digits, which needs no download"
        ) from error
    finally:
        socket.setdefaulttimeout(previous)
