"""Rows as bytes: how a sample and view become a key, and a batch of activations rows in their physical order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
    """Return an int64 key for each (sample id, view), ordered as they are; both inputs have shape (rows,)."""
    ids, view_numbers = np.asarray(sample_ids, dtype=np.int64), np.asarray(views, dtype=np.int64)
    if ids.ndim != 1 or ids.shape != view_numbers.shape:
        raise ValueError(f"sample_ids {ids.shape} and views {view_numbers.shape} must be two equally long vectors")
    in_range = (ids >= 0) & (ids < 1 << (63 - VIEW_BITS)) & (view_numbers >= 0) & (view_numbers < 1 << VIEW_BITS)
    if not in_range.all():
        at = int(np.argmin(in_range))
        raise ValueError(f"sample id {ids[at]}, view {view_numbers[at]}: need 0 <= id < 2^47 and 0 <= view < 65536")
    return ids << VIEW_BITS | view_numbers


def unpack_keys(keys: Keys) -> tuple[Keys, Keys]:
    """Return sample ids and views of these keys, each of shape (rows,)."""
    return keys >> VIEW_BITS, keys & ((1 << VIEW_BITS) - 1)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether the elements fill their memory without gaps or overlaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class RowFormat:
    """Type, shape and strides of the batches that a prefix computes, and their rows as bytes.

    Attributes:
        stored: type in the file.
        computed: type that the prefix computes and training gets back.
        shape: of one row as the model sees it, e.g. (C, H, W).
        strides: of a whole batch of `batch_rows` rows, in elements.
        batch_rows: rows of the batch that `strides` was taken from.
    """

    stored: torch.dtype
    computed: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    batch_rows: int

    @classmethod
    def of(cls, batch: Tensor, *, stored: torch.dtype | None) -> RowFormat:
        """Return the format of a dense `batch` (rows, ...); `stored` None means the type that it has."""
        if batch.dtype not in STORED_TYPES or (stored or batch.dtype) not in STORED_TYPES:
            raise ValueError(f"activations are {batch.dtype}: cacheable are {', '.join(TYPE_BY_NAME)}")
        if not is_dense(batch.shape, batch.stride()):
            raise ValueError(f"activations have strides {batch.stride()}, which do not fill {tuple(batch.shape)}")
        return cls(stored or batch.dtype, batch.dtype, tuple(batch.shape[1:]), batch.stride(), len(batch))

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions of a batch other than the first, slowest in memory first: (2, 3, 1) for channels_last."""
        return tuple(sorted(range(1, len(self.strides)), key=lambda dim: (-self.strides[dim], dim)))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one row in the file: the dimensions in their physical order."""
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
        """Tell whether the bytes of a row mean the same in both."""
        ours, theirs = ((row.stored, row.computed, row.shape, row.order) for row in (self, other))
        return ours == theirs

    def round(self, batch: Tensor) -> Tensor:
        """Return `batch` as reading it back would give it; itself when the stored type is the computed one."""
        return batch if self.stored == self.computed else batch.to(self.stored).to(self.computed)

    def pack(self, batch: Tensor) -> Tensor:
        """Return rows (rows, elements) of the stored type in physical order; a view of `batch` where it can be."""
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
        """Return strides for other numbers of rows: dimensions outside the batch dimension are whole batches apart."""
        outside = self.strides[0] * self.batch_rows
        return tuple(
            stride // self.batch_rows * batch_rows if dim > 0 and stride >= outside else stride
            for dim, stride in enumerate(self.strides)
        )
