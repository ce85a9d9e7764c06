"""The number of steps in an epoch of a training script, learned from the DataLoader that the script reads."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


def find_pass() -> Any:
    """Return the pass over a DataLoader that has just begun in this process, the shortest of several; None without one.

    A script's loop holds its iterator where nothing else can see it, so this asks the garbage collector.
    """
    found = _iterators()
    if len(found) > 1:
        del found
        gc.collect()  # some may be garbage
        found = _iterators()
    # Persistent workers keep the iterators of passes that have ended.
    return min(found, key=lambda each: (each._num_yielded, length_of(each) or float("inf")), default=None)


def _iterators() -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), _BaseDataLoaderIter) and is_under_way(each)]


def is_under_way(iterator: Any) -> bool:
    """Return True if batches were taken from `iterator`, and no more than a whole pass has."""
    yielded: int = iterator._num_yielded
    return 0 < yielded <= (length_of(iterator) or yielded)


def length_of(iterator: Any) -> int | None:
    """Return the number of batches in a whole pass; None where the loader does not know, as over a stream."""
    try:
        return len(iterator)
    except TypeError:
        return None


class EpochLength:
    """Learns the steps in an epoch: in the first step from the loader's length, else at the end of the first pass.

    Attributes:
        waits: whether the end of the first pass is waited for.
    """

    def __init__(self) -> None:
        self.waits = True
        self._first: weakref.ref[Any] | None = None
        self._yielded = 0

    def learn(self, step: int, *, passes: int) -> int | None:
        """Return the steps in an epoch, None while they are not known. Call it in each step while it `waits`.

        Args:
            step: steps before this one.
            passes: backward passes in a step, each over one batch.
        """
        if self._first is None:
            under_way = find_pass()
            batches = None if under_way is None else length_of(under_way)
            if batches is not None:
                self.waits = False
                return -(-batches // passes)
            if under_way is None or step > 0:  # a script that resumes may be in the middle of a pass
                self.waits = False
                return None
            self._first = weakref.ref(under_way)
        under_way = self._first()
        ended = under_way is None or under_way._num_yielded < self._yielded
        self._yielded = 0 if under_way is None else under_way._num_yielded
        if ended:
            self.waits = False
            return max(1, step)
        return None
