"""What a model answers for many images: decoded by threads one batch ahead, in batches of one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hvfreeze.applying.model import Applied
from hvfreeze.data.sources import PixelArray
from hvfreeze.errors import RefusedError

Decode = Callable[[int], PixelArray]
"""Returns the (3, H, W) uint8 pixels of sample 0..N-1, as the model's preparation gives them."""


def answers(applied: Applied, decode: Decode, count: int, *, batch_size: int | None) -> Iterator[tuple[int, Tensor]]:
    """Yield for each batch its first sample and the (B, classes) float32 logits of its samples, in order.

    Every batch is computed in the shape (batch_size, ...), since other shapes may give other last bits; the last one
    repeats its last sample, and leaves the repetitions out of what is yielded.

    Args:
        applied: the model.
        decode: called in threads.
        count: number of samples.
        batch_size: rows of a batch; None is that of the run's own evaluation.

    Raises:
        RefusedError: an image is damaged or cannot be read; names the file.
    """
    rows = batch_size or applied.card.batch_size
    starts = list(range(0, count, rows))
    pool = ThreadPoolExecutor(max(1, torch.get_num_threads()), thread_name_prefix="decode")

    def begin(start: int) -> list[Future[PixelArray]]:
        return [pool.submit(decode, row) for row in range(start, min(start + rows, count))]

    try:
        ahead = begin(0)
        for start in starts:
            pixels = [future.result() for future in ahead]
            ahead = begin(start + rows)
            whole = np.stack([*pixels, *[pixels[-1]] * (rows - len(pixels))])
            yield start, applied.logits(applied.transform.normalised(torch.from_numpy(whole)))[: len(pixels)]
    finally:
        pool.shutdown(cancel_futures=True)


def printable(text: str) -> str:
    """Return text that any output takes: bytes of file names that are no text become question marks."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def write_output(path: Path, text: str) -> None:
    """Write a file, making its folder; bytes of file names that are no text stay what they are.

    Raises:
        RefusedError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error.strerror}; choose another --out") from error
