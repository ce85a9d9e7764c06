"""The outputs of a model for many samples, which are decoded in threads: for prediction, evaluation and export."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvfreeze.data.images import BrokenImagesError
from hvfreeze.data.reading import PixelArray
from hvfreeze.errors import RefusedError
from hvfreeze.inference.card import Card, Preparation
from hvfreeze.runs.reading import printable

if TYPE_CHECKING:
    from hvfreeze.inference.exits import Answering

Decode = Callable[[int], PixelArray]
"""Function that returns the preprocessed (3, H, W) uint8 pixels of sample 0..N-1."""


AHEAD = 64
"""Samples to decode ahead: two threads need 2 s for 64 photographs of 12 megapixels, as the imports of libraries do."""


class Decoding:
    """Decodes samples in threads, at least two batches ahead of the consumer and from construction on, until closed.

    Args:
        decode: called in threads.
        count: number of samples.
        rows: samples per batch.
    """

    def __init__(self, decode: Decode, count: int, *, rows: int) -> None:
        self.rows = rows
        self._pool = ThreadPoolExecutor(max(1, torch.get_num_threads()), thread_name_prefix="decode")
        starts = range(0, count, rows)
        batches = (
            [(row, self._pool.submit(decode, row)) for row in range(start, min(start + rows, count))]
            for start in starts
        )
        self._ahead = deque(islice(batches, max(2, AHEAD // rows)))
        self._later = batches

    def close(self) -> None:
        """Cancel pending decodes."""
        self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[list[tuple[int, Future[PixelArray]]]]:
        """Yield the samples of each batch and their pixels, once."""
        while self._ahead:
            yield self._ahead.popleft()
            self._ahead += islice(self._later, 1)


def rows_of(card: Card, count: int, batch_size: int | None) -> int:
    """Return the batch size for `count` samples: the card's, or `batch_size`, but at most `count`."""
    return min(batch_size, max(1, count)) if batch_size else card.batch_size


def answers(
    decoding: Decoding, preparation: Preparation, answer: Callable[[Tensor], Tensor], bad: dict[int, str]
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the samples of each batch and their (B, classes) float32 logits, in order.

    Samples that cannot be decoded are skipped and added to `bad` with the reason. All batches have the shape
    (rows, ...), because other shapes may change the last bits; smaller ones are padded.
    """
    for batch in decoding:
        pixels: dict[int, PixelArray] = {}
        for row, future in batch:
            try:
                pixels[row] = future.result()
            except RefusedError as error:
                bad[row] = str(error)
        if pixels:
            found = list(pixels.values())
            whole = np.stack([*found, *found[-1:] * (decoding.rows - len(found))])
            yield list(pixels), answer(preparation.normalised(torch.from_numpy(whole)))[: len(found)]


class Collected(NamedTuple):
    """The logits of all readable samples."""

    logits: Tensor
    """(M, classes) float32."""
    rows: Tensor
    """Indices of these samples, (M,) int64."""
    sizes: list[int]
    """Readable samples per batch."""
    left_out: tuple[str, ...]
    """Reasons why samples were skipped."""


def collect(answer: Answering, decode: Decode, count: int, *, batch_size: int | None) -> Collected:
    """Return the logits of samples 0..count-1.

    Raises:
        BrokenImagesError: all samples are unreadable; names them.
    """
    applied, bad = answer.applied, dict[int, str]()
    rows, logits = list[list[int]](), list[Tensor]()
    with closing(Decoding(decode, count, rows=rows_of(applied.card, count, batch_size))) as decoding:
        for some, found in answers(decoding, applied.preparation, answer, bad):
            answer.take(len(found))
            rows.append(some)
            logits.append(found)
    if bad and not rows:
        raise BrokenImagesError([printable(reason) for reason in bad.values()])
    return Collected(
        torch.cat(logits), torch.tensor([*chain.from_iterable(rows)]), list(map(len, rows)), tuple(bad.values())
    )
