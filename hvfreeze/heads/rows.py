"""A rank's labelled rows of features, passed over again and again; they never leave the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.data.batches import Batch
from hvfreeze.ranks.world import World

CHUNK_ROWS = 512
"""Rows in a chunk, at least: in smaller ones the calls cost as much as the products."""


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


def fits(rows: int, width: int, memory_bytes: int) -> bool:
    """Tell whether as many rows of `width` features may be kept in memory."""
    return rows * width * 4 <= memory_bytes


def gather(rows: Rows, *, world: World, stop: Callable[[int], bool]) -> bool:
    """Pass over the rows once, so that what can be kept of them is; return whether some rank wants to stop.

    Args:
        rows: this rank's.
        world: the ranks.
        stop: called with the number of rows so far, after every chunk; when it returns true, this rank's pass ends.

    Collective: every rank of `world` must call this.
    """
    count, stopped = 0, False
    for chunk in rows.chunks():
        count += len(chunk.labels)
        stopped = stop(count)
        if stopped:
            break
    verdict = world.allreduce_sum(torch.tensor([int(stopped)], dtype=torch.int32), name="head.gather")
    return bool(verdict.item())


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


class RowsOfBatches:
    """Rows of a run's batches, a few to a chunk: fetched in every pass, or once where they may be kept in memory.

    Chunks, and so the bits of all sums, do not depend on whether rows are kept.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        fetch: Callable[[Batch], Tensor],
        *,
        expect: Callable[[Sequence[Batch]], None],
        width: int,
        held_out: NDArray[np.bool_],
        memory_bytes: int,
    ) -> None:
        """Fetch nothing yet.

        Args:
            batches: this rank's; may be none.
            fetch: gives a batch's features, (B, D) float32; padding is cut off here.
            expect: told which batches will be fetched next, in order.
            width: D.
            held_out: (samples,) for each sample id whether its rows are held out.
            memory_bytes: rows are kept where they take no more.
        """
        self.width = width
        self._fetch, self._expect, self._held_out = fetch, expect, held_out
        each = -(-CHUNK_ROWS // max(1, len(batches[0].ids))) if batches else 1
        self._groups = [batches[start : start + each] for start in range(0, len(batches), each)]
        self.kept = fits(sum(batch.counted for batch in batches), width, memory_bytes)
        self._chunks: list[Chunk] = []

    def chunks(self) -> Iterator[Chunk]:
        """Return a chunk for every few batches, without padding."""
        yield from list(self._chunks)
        left = self._groups[len(self._chunks) :]
        if left:
            self._expect([batch for group in left for batch in group])
        for group in left:
            ids = np.concatenate([batch.ids[: batch.counted] for batch in group])
            # Copied also where the group is one batch: what is fetched may be a buffer that the next is read into.
            features = torch.cat([self._fetch(batch)[: batch.counted].clone() for batch in group])
            labels = torch.cat([batch.labels[: batch.counted] for batch in group])
            chunk = Chunk(features, labels, torch.from_numpy(self._held_out[ids]))
            if self.kept:
                self._chunks.append(chunk)
            yield chunk
