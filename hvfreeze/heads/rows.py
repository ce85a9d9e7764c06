"""A rank's labelled rows of features, passed over again and again; they never leave the rank."""

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
from hvfreeze.data.batches import Batch, grouped

CHUNK_ROWS = 512
"""Rows in a chunk, at least: in smaller ones the calls cost as much as the products."""


@dataclass(frozen=True)
class RowInfo:
    """What is known of some rows beside their features."""

    labels: Tensor
    """(B,) int64 classes, or (B, outputs) numbers; see `tasks`."""
    held_out: Tensor
    """(B,) bool; these rows choose the penalty and are not fitted until then. Views of one sample go together."""
    samples: Tensor
    """(B,) int64: the rows of one number are views of one sample; all of them are this rank's."""
    weights: Tensor
    """(B,) float32, above 0: how much a row's error counts."""

    def only(self, kept: Tensor) -> RowInfo:
        """Return the rows of which `kept`, (B,) bool, is true."""
        return RowInfo(*(getattr(self, field.name)[kept] for field in fields(RowInfo)))

    @classmethod
    def none(cls, no_labels: Tensor) -> RowInfo:
        """Return what is known of no rows."""
        return cls(no_labels, torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), torch.zeros(0))

    @classmethod
    def together(cls, parts: Sequence[RowInfo]) -> RowInfo:
        """Return all parts as one."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(RowInfo)))


@dataclass(frozen=True)
class Chunk:
    """Some of a rank's rows."""

    features: Tensor
    """(B, D) float32, float16 or bfloat16; read, never written."""
    info: RowInfo

    def __len__(self) -> int:
        return len(self.features)

    def only(self, kept: Tensor) -> Chunk:
        """Return the rows of which `kept`, (B,) bool, is true."""
        return Chunk(self.features[kept], self.info.only(kept))


class Rows(Protocol):
    """A rank's rows; `width` is D, the number of features, equal on all ranks, also on one without rows."""

    width: int

    def chunks(self) -> Iterable[Chunk]:
        """Return the rows, the same chunks in the same order in every pass: the bits of all sums depend on them."""


class WholeRows(Rows, Protocol):
    """All of a rank's rows; of many a few are offered to look at first, and all are then read once."""

    count: int

    def sample(self) -> Rows | None:
        """Return a few of the rows, on all ranks alike where there are many; None where they are all to be kept."""

    def forget(self) -> None:
        """Let go of rows that are kept: no pass follows, or one that fetches them anew."""


def fits(rows: int, width: int, memory_bytes: int) -> bool:
    """Tell whether as many rows of `width` float32 features may be kept in memory."""
    return rows * width * 4 <= memory_bytes


def gather(rows: Rows, *, world: World, stop: Callable[[int], bool]) -> bool:
    """Pass over the rows once, so that those that fit are kept; return whether some rank wants to stop. Collective.

    `stop` is called with the number of rows so far, after every chunk; when it returns true, this rank's pass ends.
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
    """Rows held as tensors as `Chunk` has them, in chunks of `CHUNK_ROWS`; there may be none.

    Without `samples` every row is a sample of its own, numbered from `first` on; without `weights` all count alike.
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
            # A tensor without rows still splits into one empty piece.
            if len(features):
                yield Chunk(features, RowInfo(*parts))

    def sample(self) -> None:
        """Return None: they are in memory."""

    def forget(self) -> None:
        """Keep the tensors, which are the caller's."""


class SomeRows:
    """Those of a rank's rows of which `kept`, (N,) bool in their order, is true."""

    def __init__(self, rows: Rows, kept: Tensor) -> None:
        self.width = rows.width
        self._rows, self._kept = rows, kept

    def chunks(self) -> Iterator[Chunk]:
        """Return the chunks with a row that is kept, without the others; a chunk that loses none is not copied."""
        place = 0
        for chunk in self._rows.chunks():
            kept = self._kept[place : place + len(chunk)]
            place += len(chunk)
            if kept.all():
                yield chunk
            elif kept.any():
                yield chunk.only(kept)


class RowsOfBatches:
    """Rows of a run's batches, a few to a chunk: fetched in every pass, or once where they fit into memory.

    Chunks, and so the bits of all sums, do not depend on whether rows are kept.

    Args:
        batches: this rank's; may be none.
        fetch: returns a batch's features, (B, D) float32; padding is cut off here.
        expect: called with the batches that will be fetched next, in order.
        width: D.
        held_out: (samples,) for each sample id whether its rows are held out.
        weights: (samples,) float32, of each sample's rows; None where all count alike.
        memory_bytes: rows are kept where they take no more.
        sampled: how many of the batches, the first ones, are the sample, whose rows alone are kept, until all are read;
            None where all may be.
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
        self._groups = [*grouped(batches[:first], each), *grouped(batches[first:], each)]
        self._first = None if sampled is None else -(-first // each)
        self.kept = fits(rows_in(batches if sampled is None else batches[:first]), width, memory_bytes)
        self._chunks: dict[int, Chunk] = {}

    def sample(self) -> Rows | None:
        """Return the rows of the first batches; None where all may be kept."""
        return None if self._first is None else FirstRows(self, self._first)

    def chunks(self) -> Iterator[Chunk]:
        """Return a chunk for every few batches, without padding."""
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
        """Let go of rows that are kept."""
        self._chunks.clear()

    def _chunk(self, group: Sequence[Batch]) -> Chunk:
        ids = np.concatenate([batch.ids[: batch.counted] for batch in group])
        # Copied also where the group is one batch: the next batch may be fetched into the same buffer.
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
    """Return how many rows batches have, without padding."""
    return sum(batch.counted for batch in batches)
