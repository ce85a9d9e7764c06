"""Windows of text as model inputs, in any view, and their next characters.

With `--augment none`, window i begins at character i * context. Other views begin up to one context later, so that no
character is always at the edge of a window.
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
    """The offset of a window's views."""

    data_seed: int
    augment: Augment
    image_size: None = None
    """Always None: windows are not resized."""

    def of(self, ids: Ids, views: Ids, *, context: int) -> Ids:
        """Return the offset of each view in characters, (B,) in 0..context-1."""
        if self.augment.kind == "none":
            return np.zeros(len(ids), dtype=np.int64)
        return two_below(draw("window", self.data_seed, ids, views), context)[0]

    def identity(self) -> str:
        """Return a text that determines the views of given windows."""
        return json.dumps({"kind": "text", "augment": str(self.augment), "data_seed": self.data_seed})


@dataclass(frozen=True)
class Windows:
    """The windows of a text in any view, with the next characters as labels."""

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
        """Return the same windows with another augmentation; text has no flips."""
        return replace(self, transform=replace(self.transform, augment=augment))

    def _codes(self, ids: Ids, views: Ids, *, later: int) -> Tensor:
        context, codes = self.source.context, self.source.codes
        starts = ids * context + self.transform.of(ids, views, context=context)
        # The last window cannot begin later: no text follows.
        starts = np.minimum(starts, len(codes) - context - 1) + later
        return torch.from_numpy(codes[starts[:, None] + np.arange(context)].astype(np.int64))
