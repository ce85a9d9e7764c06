"""The frozen prefix's output without a cache, and what every source of it has in common.

Every prefix forward has the same number of rows, because the bits of a row depend on it; shorter batches are filled up
with repeated rows, which are neither stored nor counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.file.rows import Keys, is_dense, pack_keys, unpack_keys
from hvfreeze.cache.fingerprint import Fingerprint, bytes_of

RunBlocks = Callable[[Tensor, int, int], Tensor]
LoadImages = Callable[[Keys, Keys], Tensor]
Pairs = tuple[Keys, Keys]
"""Sample ids and views, (rows,) each."""


@dataclass
class Counters:
    """What the cache did: rows without padding, forwards of `batch_rows` rows, and seconds that training waited.

    `batches` were asked for behind a cut. `rows_advanced` are rows that were read at a shallower cut, by that cut, and
    computed on from there. `comparisons` are forwards beside these, of rows that are there, to see whether they are
    right.
    """

    batches: int = 0
    rows_read: int = 0
    rows_written: int = 0
    rows_advanced: dict[int, int] = field(default_factory=dict)
    forwards: int = 0
    comparisons: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0


class Activations(Protocol):
    """The frozen prefix's output, wherever it comes from."""

    cut: int
    failed: str | None
    counters: Counters

    def begin_cut(
        self,
        cut: int,
        *,
        mark: Fingerprint | None = None,
        universe: Pairs | None = None,
        store: bool = True,
        steady: bool = True,
    ) -> None:
        """Take the first `cut` blocks for the prefix."""

    def announce(self, batches: Sequence[Pairs]) -> None:
        """Expect these (sample ids, views) next, in this order."""

    def sweep(self, *, everything: bool = False) -> int:
        """Fill in missing rows before they are asked for; return how many."""

    def get(self, sample_ids: Keys, views: Keys, *, counted: int | None = None) -> Tensor:
        """Return the prefix's output (rows, ...) for these samples and views, each (rows,)."""

    def disable(self, reason: str, *, told: bool = False) -> None:
        """Go on without a cache."""

    def close(self) -> None:
        """Keep what is worth keeping and let go of all files."""


class PaddedPrefix:
    """Runs frozen blocks at one batch shape, without gradient, and rounds what they give as the cache would."""

    def __init__(self, run_blocks: RunBlocks, *, batch_rows: int, stored: torch.dtype | None) -> None:
        self.batch_rows = batch_rows
        self.stored = stored
        self._run_blocks = run_blocks

    def pad(self, keys: Keys) -> Keys:
        """Return `keys` repeated up to the batch shape."""
        if not 0 < len(keys) <= self.batch_rows:
            raise ValueError(f"a batch of {len(keys)} rows: need 1 to {self.batch_rows}, the training batch")
        return keys if len(keys) == self.batch_rows else np.resize(keys, self.batch_rows)

    def run(self, x: Tensor, start: int, stops: Sequence[int]) -> Tensor:
        """Return blocks start..stops[-1]-1 of `x`: (batch_rows, ...), dense, and rounded at each of `stops`."""
        with torch.no_grad():
            for stop in stops:
                x = self._run_blocks(x, start, stop)
                x = x if is_dense(x.shape, x.stride()) else x.contiguous()
                x = x if self.stored in (None, x.dtype) else x.to(self.stored).to(x.dtype)
                start = stop
        return x


class NullActivations:
    """Always computes: the reference that a cached run must equal."""

    def __init__(self, *, run_blocks: RunBlocks, load_images: LoadImages, batch_rows: int) -> None:
        self.cut = 0
        self.failed: str | None = None
        self.counters = Counters()
        self._prefix = PaddedPrefix(run_blocks, batch_rows=batch_rows, stored=None)
        self._load_images = load_images

    def begin_cut(
        self,
        cut: int,
        *,
        mark: Fingerprint | None = None,
        universe: Pairs | None = None,
        store: bool = True,
        steady: bool = True,
    ) -> None:
        """Take the first `cut` blocks for the prefix; the rest is of no interest here."""
        self.cut = cut

    def announce(self, batches: Sequence[Pairs]) -> None:
        """Do nothing: nothing is read ahead."""

    def sweep(self, *, everything: bool = False) -> int:
        """Return 0: nothing is kept, so nothing is missing."""
        return 0

    def get(self, sample_ids: Keys, views: Keys, *, counted: int | None = None) -> Tensor:
        """Return the prefix's output (rows, ...); with cut 0 the images."""
        if self.cut == 0:
            return self._load_images(sample_ids, views)
        padded = unpack_keys(self._prefix.pad(pack_keys(sample_ids, views)))
        self.counters.batches += 1
        self.counters.forwards += 1
        return self._prefix.run(self._load_images(*padded), 0, [self.cut])[: len(sample_ids)]

    def disable(self, reason: str, *, told: bool = False) -> None:
        """Do nothing: there is nothing to go without."""

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""


def permuted_batch_is_exact(run_prefix: Callable[[Tensor], Tensor], images: Tensor) -> bool:
    """Tell whether each row's bits stay the same when the rows of a batch change places, which caching relies on.

    Args:
        run_prefix: the frozen prefix in evaluation mode.
        images: (rows, C, H, W), a batch of the training shape, in the training memory format.
    """
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    permuted = torch.empty_like(images)
    torch.index_select(images, 0, order, out=permuted)
    with torch.no_grad():
        straight, moved = run_prefix(images), run_prefix(permuted)
    expected = straight.index_select(0, order)
    return torch.equal(bytes_of(expected), bytes_of(moved))
