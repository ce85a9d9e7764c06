"""The windows of a text as a model is given them, in any view, and the characters that follow.

With `--augment none` window i begins at character i * context. Other views begin up to a context later, so that no
character always stands at a window's edge.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hvfreeze.data.shards import Ids, draw, two_below
from hvfreeze.data.text import TextSource
from hvfreeze.data.views import Augment


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Where a window's views begin."""

    data_seed: int
    augment: Augment
    image_size: None = None
    """A window is never resized."""

    def of(self, ids: Ids, views: Ids, *, context: int) -> Ids:
        """Return by how many characters each view begins later than its window, (B,) in 0..context-1."""
        if self.augment.kind == "none":
            return np.zeros(len(ids), dtype=np.int64)
        return two_below(draw("window", self.data_seed, ids, views), context)[0]

    def identity(self) -> str:
        """Return everything that, beside the text, determines a view."""
        return json.dumps({"kind": "text", "augment": str(self.augment), "data_seed": self.data_seed})


@dataclass(frozen=True)
class Windows:
    """The windows of a text, in any view, and what follows their characters."""

    source: TextSource
    transform: Shift

    def load(self, ids: Ids, views: Ids) -> Tensor:
        """Return (B, context) int64 codes."""
        return self._codes(ids, views, later=0)

    def labels_of(self, ids: Ids, views: Ids) -> Tensor:
        """Return the codes of the next characters, (B, context) int64."""
        return self._codes(ids, views, later=1)

    def prefetch(self, batches: Iterable[Ids]) -> None:
        """Do nothing: the text is in memory."""

    def shown(self, augment: Augment, *, mirrors: bool) -> Windows:
        """Return the same windows in other views, none of which is a mirror image."""
        return replace(self, transform=replace(self.transform, augment=augment))

    def _codes(self, ids: Ids, views: Ids, *, later: int) -> Tensor:
        context, codes = self.source.context, self.source.codes
        starts = ids * context + self.transform.of(ids, views, context=context)
        # The last window has nothing behind it to begin later in.
        starts = np.minimum(starts, len(codes) - context - 1) + later
        return torch.from_numpy(codes[starts[:, None] + np.arange(context)].astype(np.int64))
