"""A rank's labelled rows of features, passed over again and again; they never leave the rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

CHUNK_ROWS = 256
"""Rows in a chunk: its features stay in a processor's cache between the two products that use them."""


@dataclass(frozen=True)
class Chunk:
    """Some of a rank's rows.

    Attributes:
        features: (B, D) float32, float16 or bfloat16; read, never written.
        labels: (B,) int64, in 0..classes-1.
        held_out: (B,) bool; these rows choose the penalty and are not fitted until it is chosen. Views of one sample
            must be held out together.
    """

    features: Tensor
    labels: Tensor
    held_out: Tensor


class Rows(Protocol):
    """A rank's rows. Every pass must give the same chunks in the same order: sums follow it, and so do their bits.

    Attributes:
        width: D, the number of features; equal on all ranks, also on one without rows.
    """

    width: int

    def chunks(self) -> Iterable[Chunk]:
        """Return the rank's rows from the first to the last; nothing on a rank without rows."""


class RowsInMemory:
    """Rows held as tensors, in chunks of `CHUNK_ROWS`."""

    def __init__(self, features: Tensor, labels: Tensor, held_out: Tensor) -> None:
        """Take (N, D), (N,) and (N,) tensors as `Chunk` has them; N may be 0."""
        self.width = features.shape[1]
        self._tensors = (features, labels, held_out)

    def chunks(self) -> Iterator[Chunk]:
        """Return views of the tensors."""
        for features, labels, held_out in zip(*(tensor.split(CHUNK_ROWS) for tensor in self._tensors)):
            # A tensor without rows still splits into one empty piece.
            if len(labels):
                yield Chunk(features, labels, held_out)
