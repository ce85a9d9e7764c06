"""The outputs of a model for many samples."""

from __future__ import annotations

import threading
from contextlib import closing

import numpy as np

from hvfreeze.data.reading import PixelArray
from hvfreeze.inference.answers import AHEAD, Decoding


def test_small_batches_are_decoded_as_far_ahead_as_large_ones() -> None:
    begun, reached = set[int](), threading.Event()

    def decode(row: int) -> PixelArray:
        begun.add(row)
        if len(begun) == AHEAD:
            reached.set()
        return np.full((3, 1, 1), row, np.uint8)

    with closing(Decoding(decode, 200, rows=4)) as decoding:
        assert reached.wait(60) and begun == set(range(AHEAD))
        found = [int(future.result()[0, 0, 0]) for batch in decoding for _, future in batch]
    assert found == list(range(200))
