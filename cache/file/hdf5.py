"""The only module that uses the HDF5 library: creates the frame of a file, and locates the datasets of one.

The library never touches the payload. The metadata of a new file is created in memory and written by the caller,
because the library crashes if a disk becomes full. Of an existing file only the positions of the datasets are read,
after everything that could lead outside the file or to an allocation was refused.
"""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import distrust

# Set before the library loads: a file must not be able to make it load filter plug-ins.
os.environ["HDF5_PLUGIN_PRELOAD"] = "::"

import h5py
import numpy as np

PAGE_BYTES = 4096
ALLOWED_TYPES = ("<f2", "<f4", "<f8", "<u2", "<i4", "<i8", "|u1")
# Metadata checksums come with this version of the file format.
VERSION_BOUNDS = ("v110", "v110")


@dataclass(frozen=True)
class Region:
    """A contiguous dataset: the position of its bytes in the file."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the dataset in the file."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Frame:
    """An HDF5 file without payload: `extents` are the metadata bytes by offset, `size` the bytes of the whole file."""

    extents: Mapping[int, bytes]
    regions: Mapping[str, Region]
    size: int


class _SparseFile(io.RawIOBase):
    """A sparse file in memory, so that a frame of a terabyte needs a kilobyte."""

    def __init__(self) -> None:
        self.extents: dict[int, bytes] = {}
        self.size = 0
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def write(self, data: object) -> int:
        content = bytes(memoryview(data))  # type: ignore[arg-type]
        self.extents[self._position] = content
        self._position += len(content)
        self.size = max(self.size, self._position)
        return len(content)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size


def make_frame(
    datasets: Mapping[str, tuple[tuple[int, ...], str]], attributes: Mapping[str, Mapping[str, str | int]]
) -> Frame:
    """Return the frame of a file with these contiguous datasets of fixed size."""
    image = _SparseFile()
    regions = {}
    alignment = {"alignment_threshold": PAGE_BYTES, "alignment_interval": PAGE_BYTES}
    with h5py.File(image, "w", libver=VERSION_BOUNDS, **alignment) as file:
        for name, (shape, dtype) in datasets.items():
            place = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            place.set_layout(h5py.h5d.CONTIGUOUS)
            place.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            place.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            place.set_obj_track_times(False)
            kind, space = h5py.h5t.py_create(np.dtype(dtype)), h5py.h5s.create_simple(shape)
            dataset = h5py.h5d.create(file.id, name.encode(), kind, space, dcpl=place)
            regions[name] = Region(dataset.get_offset(), shape, dtype)
        for name, pairs in attributes.items():
            for key, value in pairs.items():
                file[name].attrs[key] = np.bytes_(value) if isinstance(value, str) else value
    return Frame(dict(sorted(image.extents.items())), regions, image.size)


def find_regions(path: Path, *, names: frozenset[str], private: bool = False) -> tuple[int, dict[str, Region]]:
    """Open an untrusted file; return a descriptor and the positions of its datasets.

    Nothing is allocated or read except the library's own metadata. The caller must close the descriptor.

    Raises:
        CacheFault: `path` is a link, not a regular file or not HDF5; it contains anything but exactly `names` as plain,
            contiguous, unfiltered datasets of known types inside the file without overlap; or another user may have
            written it, see `distrust`.
    """
    descriptor = _open_regular(path)
    try:
        if reason := distrust(os.fstat(descriptor), private=private):
            raise CacheFault(reason)
        size = os.fstat(descriptor).st_size
        # The library raises many types for a malformed file, and every one of them means the same here.
        try:
            with h5py.File(path, "r", locking=False) as file:
                _require(
                    os.path.sameopenfile(file.id.get_vfd_handle(), descriptor),
                    "another process replaced it while it was being opened",
                )
                regions = {name: _region(file, name, size) for name in _flat_names(file, names)}
        except CacheFault:
            raise
        except Exception as error:
            raise CacheFault(f"it is not a readable HDF5 file ({error})") from error
        _require_disjoint(regions)
    except CacheFault as fault:
        os.close(descriptor)
        raise CacheFault(f"cache file {path} refused: {fault}") from fault.__cause__
    return descriptor, regions


def _open_regular(path: Path) -> int:
    """Return a read-only descriptor; never follows a link and never blocks on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CacheFault(f"cache file {path} refused: it cannot be opened without following links ({error})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CacheFault(f"cache file {path} refused: it is not a regular file")
    return descriptor


def _flat_names(file: h5py.File, names: frozenset[str]) -> list[str]:
    _require(file.userblock_size == 0, "it has a user block")
    _require(len(file.id) == len(names), f"its root group has {len(file.id)} entries instead of {len(names)}")
    for name in sorted(names):
        _require(file.id.links.exists(name.encode()), f"dataset '{name}' is missing")
        link = file.id.links.get_info(name.encode())
        _require(link.type == h5py.h5l.TYPE_HARD, f"'{name}' is a soft or external link")
        kind = h5py.h5o.get_info(file.id, name.encode()).type
        _require(kind == h5py.h5o.TYPE_DATASET, f"'{name}' is not a dataset")
    return sorted(names)


def _region(file: h5py.File, name: str, file_size: int) -> Region:
    dataset = h5py.h5d.open(file.id, name.encode())
    place, space, kind = dataset.get_create_plist(), dataset.get_space(), dataset.get_type()
    _require(place.get_external_count() == 0, f"'{name}' stores its data in another file")
    _require(place.get_layout() == h5py.h5d.CONTIGUOUS, f"'{name}' is virtual, chunked or compact, not contiguous")
    _require(place.get_nfilters() == 0, f"'{name}' uses filters")
    dtype = next((known for known in ALLOWED_TYPES if kind.equal(h5py.h5t.py_create(np.dtype(known)))), None)
    if dtype is None:
        raise CacheFault(f"the type of '{name}' is not one of {', '.join(ALLOWED_TYPES)}")
    _require(space.get_simple_extent_type() == h5py.h5s.SIMPLE, f"'{name}' is not an array")
    _require(0 < space.get_simple_extent_ndims() <= 9, f"'{name}' has too many dimensions")
    region = Region(dataset.get_offset() or 0, tuple(map(int, space.get_simple_extent_dims())), dtype)
    inside = region.offset > 0 and region.offset + region.nbytes <= file_size
    _require(min(region.shape) > 0 and inside, f"'{name}' {region.shape} exceeds the file's {file_size} bytes")
    return region


def _require_disjoint(regions: Mapping[str, Region]) -> None:
    ordered = sorted(regions.items(), key=lambda item: item[1].offset)
    for (first, before), (second, after) in pairwise(ordered):
        _require(before.offset + before.nbytes <= after.offset, f"'{first}' and '{second}' overlap")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CacheFault(otherwise)
