"""Which views of a sample the epochs of a run show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvfreeze.config.rules import parse_views
from hvfreeze.data.draws import Ids, draw, two_below


@dataclass(frozen=True)
class Augment:
    """Which views of a sample the epochs of a run show."""

    kind: str
    """`none`, `fresh`, `views`, or `mirrored`: the sample is view 0 and its mirror image view 1."""
    num_views: int
    """Distinct views of a sample; 0 means a new one every epoch, which no cache can hold."""

    def __str__(self) -> str:
        return f"views:{self.num_views}" if self.kind == "views" else self.kind

    def view_of(self, ids: Ids, *, epoch: int, data_seed: int) -> Ids:
        """Return the (B,) int64 views that `epoch` shows of the (B,) samples `ids`.

        `none`: always 0. `fresh`: the epoch. `views:K`, and `mirrored` as 2 views: (offset(data seed, sample) + epoch)
        mod K, so that K epochs show every view once and each epoch mixes all views.
        """
        if self.kind == "none":
            return np.zeros(len(ids), dtype=np.int64)
        if self.kind == "fresh":
            return np.full(len(ids), epoch, dtype=np.int64)
        offset, _ = two_below(draw("offset", data_seed, ids), self.num_views)
        return (offset + epoch) % self.num_views


MIRRORED = Augment("mirrored", 2)


def parse_augment(text: str) -> Augment:
    """Return the meaning of an --augment value.

    Raises:
        UsageError: it is not `none`, `fresh` or `views:K` with K from 1 to 65536.
    """
    return Augment(*parse_views(text))
