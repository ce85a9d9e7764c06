"""A rank's labelled rows of features, which are read repeatedly and never leave the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.data.batches import Batch, group_batches

CHUNK_ROWS = 512
"""Minimum number of rows per chunk; in smaller chunks, operator calls take as long as the products."""


@dataclass(frozen=True)
class RowInfo:
    """The labels, weights and samples of rows."""

    labels: Tensor
    """Labels: classes, (B,) int64, or (B, outputs); see `tasks`."""
    held_out: Tensor
    """Mask of held-out rows, (B,) bool, which choose the penalty before the final fit. Views stay together."""
    samples: Tensor
    """Sample of each row, (B,) int64; its augmented views are on the same rank."""
    weights: Tensor
    """Weight of each row in the loss, above 0, (B,) float32."""

    def only(self, kept: Tensor) -> RowInfo:
        """Return the rows in the mask `kept`, (B,)."""
        return RowInfo(*(getattr(self, field.name)[kept] for field in fields(RowInfo)))

    @classmethod
    def none(cls, no_labels: Tensor) -> RowInfo:
        """Return an empty instance."""
        return cls(no_labels, torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), torch.zeros(0))

    @classmethod
    def together(cls, parts: Sequence[RowInfo]) -> RowInfo:
        """Concatenate parts."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(RowInfo)))


@dataclass(frozen=True)
class Chunk:
    """A chunk of a rank's rows."""

    features: Tensor
    """Features, (B, D) float32, float16 or bfloat16; read-only."""
    info: RowInfo

    def __len__(self) -> int:
        return len(self.features)

    def only(self, kept: Tensor) -> Chunk:
        """Return the rows in the mask `kept`, (B,)."""
        return Chunk(self.features[kept], self.info.only(kept))


class Rows(Protocol):
    """A rank's rows; `width` is the number of features, D, equal on all ranks, also without rows."""

    width: int

    def chunks(self) -> Iterable[Chunk]:
        """Return the rows in the same chunks and the same order in every pass, which all sums depend on bitwise."""


class WholeRows(Rows, Protocol):
    """All of a rank's rows, with a subset that determines the projection if there are many."""

    count: int

    def sample(self) -> Rows | None:
        """Return a subset of many rows, on all ranks alike; None if all rows stay in memory."""

    def forget(self) -> None:
        """Free stored rows; another pass fetches them again."""


def fits(rows: int, width: int, memory_bytes: int) -> bool:
    """Return True if `rows` rows of `width` float32 features fit `memory_bytes`."""
    return rows * width * 4 <= memory_bytes


def gather(rows: Rows, *, world: World, stop: Callable[[int], bool]) -> bool:
    """Read the rows once, storing as many as fit; return True if a rank stops the fit. Collective.

    `stop` is called after every chunk with the number of rows so far; True ends this rank's pass.
    """
    count, stopped = 0, False
    for chunk in rows.chunks():
        count += len(chunk)
        stopped = stop(count)
        if stopped:
            break
    verdict = world.allreduce_sum(torch.tensor([int(stopped)], dtype=torch.int32), name="head.gather")
    return bool(verdict.item())


class RowsInMemory:
    """Rows in memory as tensors, in chunks of `CHUNK_ROWS`; there may be no rows.

    Without `samples`, each row is a sample; samples are numbered from `first`. Without `weights`, all weights are 1.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        held_out: Tensor,
        samples: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        first: int = 0,
    ) -> None:
        self.width, self.count = features.shape[1], len(labels)
        samples = torch.arange(first, first + len(labels)) if samples is None else samples
        self._features = features
        self._info = RowInfo(labels, held_out, samples, torch.ones(len(labels)) if weights is None else weights)

    def chunks(self) -> Iterator[Chunk]:
        """Return views of the tensors."""
        info = self._info
        columns = (self._features, info.labels, info.held_out, info.samples, info.weights)
        for features, *parts in zip(*(column.split(CHUNK_ROWS) for column in columns)):
            # A tensor without rows splits into one empty piece.
            if len(features):
                yield Chunk(features, RowInfo(*parts))

    def sample(self) -> None:
        """Return None: they are in memory."""

    def forget(self) -> None:
        """Do nothing: the tensors belong to the caller."""


class SomeRows:
    """The rows in the mask `kept`, (N,), of a rank's rows."""

    def __init__(self, rows: Rows, kept: Tensor) -> None:
        self.width = rows.width
        self._rows, self._kept = rows, kept

    def chunks(self) -> Iterator[Chunk]:
        """Return the chunks without the other rows; complete chunks are not copied."""
        place = 0
        for chunk in self._rows.chunks():
            kept = self._kept[place : place + len(chunk)]
            place += len(chunk)
            if kept.all():
                yield chunk
            elif kept.any():
                yield chunk.only(kept)


class RowsOfBatches:
    """Rows from the batches of a run, a few per chunk: fetched in every pass, or once if they fit memory.

    Chunks, and therefore sums, do not depend on whether rows are stored.

    Args:
        batches: this rank's batches; may be empty.
        fetch: returns a batch's features, (B, D) float32; padding is removed here.
        expect: called with the batches that will be fetched next, in order.
        width: number of features, D.
        held_out: mask of held-out sample ids, (samples,).
        weights: weight of each sample's rows, (samples,) float32; None is 1.
        memory_bytes: limit for storing rows.
        sampled: number of first batches that form the subset; only its rows are stored, until all are read. None if
            all rows may be stored.
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
        weights: NDArray[np.float32] | None = None,
        sampled: int | None = None,
    ) -> None:
        self.width, self.count = width, rows_in(batches)
        self._fetch, self._expect, self._held_out, self._weights = fetch, expect, held_out, weights
        each = -(-CHUNK_ROWS // max(1, len(batches[0].ids))) if batches else 1
        first = sampled or 0
        self._groups = [*group_batches(batches[:first], each), *group_batches(batches[first:], each)]
        self._first = None if sampled is None else -(-first // each)
        self.kept = fits(rows_in(batches if sampled is None else batches[:first]), width, memory_bytes)
        self._chunks: dict[int, Chunk] = {}

    def sample(self) -> Rows | None:
        """Return the rows of the first batches; None if all rows may be stored."""
        return None if self._first is None else FirstRows(self, self._first)

    def chunks(self) -> Iterator[Chunk]:
        """Return chunks of a few batches each, without padding."""
        for number, chunk in enumerate(self.chunks_until(len(self._groups))):
            if self._first is not None:
                self._chunks.pop(number, None)
            yield chunk

    def chunks_until(self, stop: int) -> Iterator[Chunk]:
        """Return the first `stop` chunks."""
        missing = [batch for number in range(stop) if number not in self._chunks for batch in self._groups[number]]
        if missing:
            self._expect(missing)
        for number in range(stop):
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = self._chunk(self._groups[number])
                if self.kept and (self._first is None or number < self._first):
                    self._chunks[number] = chunk
            yield chunk

    def forget(self) -> None:
        """Free stored rows."""
        self._chunks.clear()

    def _chunk(self, group: Sequence[Batch]) -> Chunk:
        ids = np.concatenate([batch.ids[: batch.counted] for batch in group])
        # Copied even for a group of one batch: the next batch may reuse the buffer.
        features = torch.cat([self._fetch(batch)[: batch.counted].clone() for batch in group])
        labels = torch.cat([batch.labels[: batch.counted] for batch in group])
        weights = torch.ones(len(ids)) if self._weights is None else torch.from_numpy(self._weights[ids])
        return Chunk(features, RowInfo(labels, torch.from_numpy(self._held_out[ids]), torch.from_numpy(ids), weights))


class FirstRows:
    """The rows of the first `stop` chunks of `rows`."""

    def __init__(self, rows: RowsOfBatches, stop: int) -> None:
        self.width = rows.width
        self.chunks = partial(rows.chunks_until, stop)


def rows_in(batches: Sequence[Batch]) -> int:
    """Return the number of rows in batches, without padding."""
    return sum(batch.counted for batch in batches)
