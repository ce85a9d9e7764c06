"""What a cache file says about itself, the tables beside it, and the digests that bind both to the payload."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.hdf5 import Region
from hvfreeze.cache.file.rows import STORED_TYPES, TYPE_BY_NAME, Keys, RowFormat, is_dense, unpack_keys
from hvfreeze.cache.fingerprint import JSON, Fingerprint, canonical, fingerprint

FORMAT = "hvfreeze activation cache"
VERSION = 1
PAYLOAD = "activations"
RANGE_BYTES = 1 << 20
MAX_ROWS = 1 << 26
MAX_MANIFEST_BYTES = 1 << 20
# Room for the numbers that only publication knows, and a multiple that keeps equal files equally long.
SPARE_BYTES, ROUND_BYTES = 256, 1024
UNWRITTEN = -1
TABLES = ("sample_ids", "views", "range_sha256")
NAMES = frozenset((PAYLOAD, *TABLES, "manifest", "manifest_sha256"))


@dataclass(frozen=True)
class Manifest:
    """The contents of the dataset `manifest`: what the rows are, and how many of them were written."""

    fingerprint: Fingerprint
    row: RowFormat
    capacity: int
    rows: int
    owner: str

    @property
    def range_rows(self) -> int:
        """Rows under one SHA-256: about a MiB of them."""
        return max(1, RANGE_BYTES // self.row.row_bytes)

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
        """Return what people who open the file should see; nothing here is read back."""
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
        """Return the manifest in these bytes.

        Raises:
            CacheFault: the bytes are no manifest of this version, or its parts contradict each other.
        """
        try:
            value = json.loads(content)
            if (value["format"], value["version"]) != (FORMAT, VERSION):
                raise CacheFault(f"format {value['format']!r} version {value['version']!r}, need {VERSION}")
            mark = fingerprint(value["identity"], exactness=value["exactness"])
            types = TYPE_BY_NAME[value["stored"]], TYPE_BY_NAME[value["computed"]]
            shape, strides = (tuple(map(int, value[name])) for name in ("shape", "strides"))
            row = RowFormat(*types, shape, strides, int(value["batch_rows"]))
            manifest = cls(mark, row, int(value["capacity"]), int(value["rows"]), str(value["owner"]))
            agrees = (mark.digest, manifest.range_rows) == (value["fingerprint"], value["range_rows"])
        except (ValueError, KeyError, TypeError, ArithmeticError, AttributeError, RecursionError) as error:
            raise CacheFault(f"its manifest is unreadable ({error!r})") from error
        if not agrees:
            raise CacheFault("its manifest contradicts itself")
        manifest._check_sizes()
        return manifest

    def _check_sizes(self) -> None:
        if not (0 < self.rows <= self.capacity <= MAX_ROWS):
            raise CacheFault(f"{self.rows} rows of {self.capacity}: need 0 < rows <= capacity <= {MAX_ROWS}")
        row = self.row
        batch = (row.batch_rows, *row.shape)
        if min(batch) < 1 or len(batch) != len(row.strides) or not is_dense(batch, row.strides):
            raise CacheFault(f"strides {row.strides} do not fill a batch of shape {batch}")


def manifest_digest(pieces: Callable[[str], Iterable[bytes]], regions: Mapping[str, Region]) -> bytes:
    """Return a SHA-256 over the manifest and all tables, taken piece by piece, and over what the payload is."""
    payload = regions[PAYLOAD]
    digest = hashlib.sha256(f"{FORMAT} {VERSION}\0{payload.shape}{payload.dtype}".encode())
    for name in ("manifest", *TABLES):
        digest.update(f"\0{name}\0{regions[name].nbytes}\0".encode())
        for piece in pieces(name):
            digest.update(piece)
    return digest.digest()


def start_range(manifest: Manifest, index: int) -> hashlib._Hash:
    """Return a SHA-256 that is bound to range `index` of these activations, and still waits for the range's bytes."""
    bound = f"{FORMAT}\0{manifest.fingerprint.digest}\0{PAYLOAD}\0".encode()
    return hashlib.sha256(bound + index.to_bytes(8, "little"))


class RangeHasher:
    """The digests of rows that arrive in file order."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._range_bytes = manifest.range_rows * manifest.row.row_bytes
        self._finished: list[bytes] = []
        self._filled = 0
        self._open = start_range(manifest, 0)

    def update(self, content: memoryview) -> None:
        """Take the bytes of the next rows."""
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
    """Compare all rows, of which `read` returns those from the first to before the second number, with their digests.

    Raises:
        CacheFault: a range does not have the contents that its digest was taken from.
    """
    for index, first in enumerate(range(0, manifest.rows, manifest.range_rows)):
        last = min(first + manifest.range_rows, manifest.rows)
        digest = start_range(manifest, index)
        digest.update(read(first, last))
        if digest.digest() != digests[index]:
            raise CacheFault(f"rows {first}..{last - 1} are damaged")


def tables(manifest: Manifest, keys: Keys, digests: list[bytes], *, manifest_bytes: int) -> dict[str, bytes]:
    """Return the bytes of every dataset but the rows and the manifest's digest.

    Args:
        manifest: as it stands at publication.
        keys: (rows,) of the rows, in file order.
        digests: one per range with at least one row.
        manifest_bytes: length of the dataset `manifest`; JSON ignores the spaces at its end.
    """
    ids, views = np.full(manifest.capacity, UNWRITTEN, "<i8"), np.full(manifest.capacity, UNWRITTEN, "<i4")
    ids[: len(keys)], views[: len(keys)] = unpack_keys(keys)
    return {
        "manifest": manifest.to_json().ljust(manifest_bytes),
        "sample_ids": ids.tobytes(),
        "views": views.tobytes(),
        "range_sha256": b"".join(digests).ljust(manifest.num_ranges * 32, b"\0"),
    }
