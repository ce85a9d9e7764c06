"""The format of a cache file: rows as bytes, the manifest, and the digests of both."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.hdf5 import Region
from hvfreeze.cache.fingerprint import JSON, Fingerprint, canonical

Keys = npt.NDArray[np.int64]

VIEW_BITS = 16

STORED_TYPES = {
    torch.float16: "<f2",
    torch.bfloat16: "<u2",
    torch.float32: "<f4",
    torch.float64: "<f8",
}
TYPE_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_TYPES}


def pack_keys(sample_ids: npt.ArrayLike | Tensor, views: npt.ArrayLike | Tensor) -> Keys:
    """Return an int64 key for each (sample id, view), in the same order; both inputs have shape (rows,)."""
    ids, view_numbers = np.asarray(sample_ids, dtype=np.int64), np.asarray(views, dtype=np.int64)
    if ids.ndim != 1 or ids.shape != view_numbers.shape:
        raise ValueError(
            f"sample_ids {ids.shape} and views {view_numbers.shape} must be two vectors of the same length"
        )
    in_range = (ids >= 0) & (ids < 1 << (63 - VIEW_BITS)) & (view_numbers >= 0) & (view_numbers < 1 << VIEW_BITS)
    if not in_range.all():
        at = int(np.argmin(in_range))
        raise ValueError(f"sample id {ids[at]}, view {view_numbers[at]}: must be 0 <= id < 2^47 and 0 <= view < 65536")
    return ids << VIEW_BITS | view_numbers


def unpack_keys(keys: Keys) -> tuple[Keys, Keys]:
    """Return sample ids and views of these keys, each of shape (rows,)."""
    return keys >> VIEW_BITS, keys & ((1 << VIEW_BITS) - 1)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class RowFormat:
    """Type, shape and strides of the batches that a prefix computes, and the conversion of rows to bytes."""

    stored: torch.dtype
    computed: torch.dtype
    """The type that training gets back."""
    shape: tuple[int, ...]
    """Shape of one row as the model sees it, e.g. (C, H, W)."""
    strides: tuple[int, ...]
    """Strides of a batch of `batch_rows` rows, in elements."""
    batch_rows: int

    @classmethod
    def of(cls, batch: Tensor, *, stored: torch.dtype | None) -> RowFormat:
        """Return the format of a dense `batch` (rows, ...); with `stored` None it is stored in its own type."""
        if batch.dtype not in STORED_TYPES or (stored or batch.dtype) not in STORED_TYPES:
            raise ValueError(f"activations are {batch.dtype}; the cache stores {', '.join(TYPE_BY_NAME)}")
        if not is_dense(batch.shape, batch.stride()):
            raise ValueError(
                f"activations have strides {batch.stride()}, which are not dense for shape {tuple(batch.shape)}"
            )
        return cls(stored or batch.dtype, batch.dtype, tuple(batch.shape[1:]), batch.stride(), len(batch))

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions of a batch except the first, slowest in memory first: (2, 3, 1) for channels_last."""
        return tuple(sorted(range(1, len(self.strides)), key=lambda dim: (-self.strides[dim], dim)))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one row in the file: the dimensions in physical order."""
        return tuple(self.shape[dim - 1] for dim in self.order)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row in the file."""
        return self.num_elements * self.stored.itemsize

    @property
    def num_elements(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape)

    def same_rows(self, other: RowFormat) -> bool:
        """Return True if the bytes of a row mean the same in both formats."""
        ours, theirs = ((row.stored, row.computed, row.shape, row.order) for row in (self, other))
        return ours == theirs

    def pack(self, batch: Tensor) -> Tensor:
        """Return rows (rows, elements) of the stored type in physical order; a view of `batch` if possible."""
        return batch.to(self.stored).permute(0, *self.order).reshape(len(batch), -1)

    def unpack(self, raw: Tensor, *, batch_rows: int) -> Tensor:
        """Return the activations in `raw` (rows, elements), with the strides that a forward of `batch_rows` gives."""
        flat = raw if self.stored == self.computed else raw.to(self.computed)
        if self._batch_is_outermost:
            num_rows, num_elements = flat.shape
            return flat.as_strided((num_rows, *self.shape), (num_elements, *self.strides[1:]))
        batch = torch.empty_strided((batch_rows, *self.shape), self._strides_at(batch_rows), dtype=self.computed)
        batch = batch[: len(raw)]
        batch.permute(0, *self.order).copy_(flat.view(len(raw), *self.stored_shape))
        return batch

    @cached_property
    def _batch_is_outermost(self) -> bool:
        others = [stride for stride, size in zip(self.strides[1:], self.shape, strict=True) if size > 1]
        return self.batch_rows == 1 or self.strides[0] >= max(others, default=1)

    def _strides_at(self, batch_rows: int) -> tuple[int, ...]:
        """Return strides for another number of rows: dimensions outside the batch dimension are whole batches apart."""
        outside = self.strides[0] * self.batch_rows
        return tuple(
            stride // self.batch_rows * batch_rows if dim > 0 and stride >= outside else stride
            for dim, stride in enumerate(self.strides)
        )


FORMAT = "hvfreeze activation cache"
VERSION = 1
PAYLOAD = "activations"
MAX_ROWS = 1 << 26
MAX_MANIFEST_BYTES = 1 << 20
# Room for the numbers that only publication knows, and a multiple that keeps equal files equally long.
SPARE_BYTES, ROUND_BYTES = 256, 1024
TABLES = ("sample_ids", "views", "range_sha256")
NAMES = frozenset((PAYLOAD, *TABLES, "manifest", "manifest_sha256"))


@dataclass(frozen=True)
class Manifest:
    """The manifest of a cache file: the identity of its rows, and how many of them were written."""

    fingerprint: Fingerprint
    row: RowFormat
    capacity: int
    rows: int
    owner: str

    @property
    def range_rows(self) -> int:
        """Rows under one SHA-256, about 1 MiB."""
        return max(1, (1 << 20) // self.row.row_bytes)

    @property
    def num_ranges(self) -> int:
        """Ranges in the file, written or not."""
        return -(-self.capacity // self.range_rows)

    @property
    def payload(self) -> tuple[tuple[int, ...], str]:
        """Shape and numpy type of the dataset with the rows."""
        return (self.capacity, *self.row.stored_shape), STORED_TYPES[self.row.stored]

    def datasets(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and numpy type of each dataset, the rows last."""
        length = len(self.to_json()) + SPARE_BYTES
        return {
            "manifest": ((-(-length // ROUND_BYTES) * ROUND_BYTES,), "|u1"),
            "manifest_sha256": ((32,), "|u1"),
            "sample_ids": ((self.capacity,), "<i8"),
            "views": ((self.capacity,), "<i4"),
            "range_sha256": ((self.num_ranges, 32), "|u1"),
            PAYLOAD: self.payload,
        }

    def attributes(self) -> dict[str, dict[str, str | int]]:
        """Return attributes for people who open the file; the program does not read them."""
        order = ",".join(map(str, self.row.order))
        cut, split = (str(self.fingerprint.fields.get(name, "")) for name in ("cut", "split"))
        return {
            "/": {"format": FORMAT, "version": VERSION, "cut": cut, "split": split},
            PAYLOAD: {"dtype": str(self.row.stored).removeprefix("torch."), "dimension_order": order},
        }

    def to_json(self) -> bytes:
        """Return the manifest as JSON, without padding."""
        value: dict[str, JSON] = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint.digest,
            "identity": self.fingerprint.fields,
            "exactness": self.fingerprint.exactness,
            "stored": str(self.row.stored).removeprefix("torch."),
            "computed": str(self.row.computed).removeprefix("torch."),
            "shape": self.row.shape,
            "strides": self.row.strides,
            "batch_rows": self.row.batch_rows,
            "capacity": self.capacity,
            "rows": self.rows,
            "range_rows": self.range_rows,
            "owner": self.owner,
        }
        return canonical(value).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Manifest:
        """Parse a manifest; raises CacheFault if it has another version or is inconsistent."""
        try:
            value = json.loads(content)
            if (value["format"], value["version"]) != (FORMAT, VERSION):
                raise CacheFault(
                    f"it has format {value['format']!r} version {value['version']!r}; this version reads {VERSION}"
                )
            fingerprint = Fingerprint.of(value["identity"], exactness=value["exactness"])
            types = TYPE_BY_NAME[value["stored"]], TYPE_BY_NAME[value["computed"]]
            shape, strides = (tuple(map(int, value[name])) for name in ("shape", "strides"))
            row = RowFormat(*types, shape, strides, int(value["batch_rows"]))
            manifest = cls(fingerprint, row, int(value["capacity"]), int(value["rows"]), str(value["owner"]))
            agrees = (fingerprint.digest, manifest.range_rows) == (value["fingerprint"], value["range_rows"])
        except (ValueError, KeyError, TypeError, ArithmeticError, AttributeError, RecursionError) as error:
            raise CacheFault(f"its manifest is unreadable ({error!r})") from error
        if not agrees:
            raise CacheFault("its manifest is inconsistent")
        manifest._check_sizes()
        return manifest

    def _check_sizes(self) -> None:
        if not (0 < self.rows <= self.capacity <= MAX_ROWS):
            raise CacheFault(f"it has {self.rows} rows of {self.capacity}; must be 0 < rows <= capacity <= {MAX_ROWS}")
        row = self.row
        batch = (row.batch_rows, *row.shape)
        if min(batch) < 1 or len(batch) != len(row.strides) or not is_dense(batch, row.strides):
            raise CacheFault(f"its strides {row.strides} are not dense for a batch of shape {batch}")


def manifest_digest(pieces: Callable[[str], Iterable[bytes]], regions: Mapping[str, Region]) -> bytes:
    """Return a SHA-256 over the manifest, all tables (read piece by piece) and the type of the payload."""
    payload = regions[PAYLOAD]
    digest = hashlib.sha256(f"{FORMAT} {VERSION}\0{payload.shape}{payload.dtype}".encode())
    for name in ("manifest", *TABLES):
        digest.update(f"\0{name}\0{regions[name].nbytes}\0".encode())
        for piece in pieces(name):
            digest.update(piece)
    return digest.digest()


def start_range(manifest: Manifest, index: int) -> hashlib._Hash:
    """Return a SHA-256 seeded with range `index` of these activations, to be updated with the range's bytes."""
    bound = f"{FORMAT}\0{manifest.fingerprint.digest}\0{PAYLOAD}\0".encode()
    return hashlib.sha256(bound + index.to_bytes(8, "little"))


class RangeHasher:
    """The range digests of rows that arrive in file order."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._range_bytes = manifest.range_rows * manifest.row.row_bytes
        self._finished: list[bytes] = []
        self._filled = 0
        self._open = start_range(manifest, 0)

    def update(self, content: memoryview) -> None:
        """Update the digests with the bytes of the next rows."""
        while len(content):
            taken = content[: self._range_bytes - self._filled]
            self._open.update(taken)
            self._filled += len(taken)
            content = content[len(taken) :]
            if self._filled == self._range_bytes:
                self._finished.append(self._open.digest())
                self._filled = 0
                self._open = start_range(self._manifest, len(self._finished))

    def digests(self) -> list[bytes]:
        """Return the digests of all ranges with at least one row; the last may be partly filled."""
        return [*self._finished, self._open.digest()] if self._filled else list(self._finished)


def verify_ranges(manifest: Manifest, digests: Sequence[bytes], read: Callable[[int, int], bytes]) -> None:
    """Compare all rows with their digests; `read(first, last)` returns the bytes of rows first..last-1.

    Raises:
        CacheFault: the contents of a range do not match its digest.
    """
    for index, first in enumerate(range(0, manifest.rows, manifest.range_rows)):
        last = min(first + manifest.range_rows, manifest.rows)
        digest = start_range(manifest, index)
        digest.update(read(first, last))
        if digest.digest() != digests[index]:
            raise CacheFault(f"rows {first}..{last - 1} are damaged")


def tables(manifest: Manifest, keys: Keys, digests: list[bytes], *, manifest_bytes: int) -> dict[str, bytes]:
    """Return the bytes of every dataset except the rows and the manifest's digest."""
    # -1: not written.
    ids, views = np.full(manifest.capacity, -1, "<i8"), np.full(manifest.capacity, -1, "<i4")
    ids[: len(keys)], views[: len(keys)] = unpack_keys(keys)
    return {
        "manifest": manifest.to_json().ljust(manifest_bytes),
        "sample_ids": ids.tobytes(),
        "views": views.tobytes(),
        "range_sha256": b"".join(digests).ljust(manifest.num_ranges * 32, b"\0"),
    }
