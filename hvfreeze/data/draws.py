"""Random bits as a pure function of named words, so that a draw depends on no generator's history, rank or batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Bits = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def _word(value: str | int | Ids) -> Bits:
    # At least one axis: numpy warns of wrap-around in scalars and not in arrays, and wrap-around is what is wanted.
    if isinstance(value, str):
        return np.array([int.from_bytes(value.encode("ascii"), "little")], dtype=np.uint64)
    if isinstance(value, int):
        return np.array([value % 2**64], dtype=np.uint64)
    return np.atleast_1d(value).astype(np.uint64)


def draw(purpose: str, *words: int | Ids) -> Bits:
    """Return 64 random bits for every row of the broadcast words (splitmix64, one round a word).

    Args:
        purpose: At most eight ASCII letters that keep the draws of one use apart from those of another.
        words: Integers, or int64 arrays of one common shape (B,).

    Returns:
        (B,) uint64, or (1,) when all words are integers.
    """
    state = _word(purpose)
    for word in words:
        state = (state ^ _word(word)) + _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        state = state ^ (state >> np.uint64(31))
    return state


def two_below(bits: Bits, limit: int) -> tuple[Ids, Ids]:
    """Return two independent (B,) int64 arrays of integers in 0..limit-1 (limit below 2**32) from one draw."""
    high = ((bits >> _HALF) * np.uint64(limit)) >> _HALF
    low = ((bits & _LOW_HALF) * np.uint64(limit)) >> _HALF
    return high.astype(np.int64), low.astype(np.int64)


def shuffled(ids: Ids, purpose: str, *words: int) -> Ids:
    """Return the distinct `ids` in the order of their own draws, so that adding an id moves no other one."""
    return ids[np.argsort(draw(purpose, *words, ids), kind="stable")]
