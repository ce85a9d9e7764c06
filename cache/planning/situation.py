"""What a rank has measured and knows when it is decided whether the rows of a cut are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvfreeze.cache.planning.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What one rank has measured and knows; seconds are per batch.

    Attributes:
        image_seconds: loading and augmenting the images that the prefix needs.
        prefix_seconds: forward of the prefix.
        suffix_seconds: the rest of the training step, behind which reading ahead and writing can hide.
        batch_rows: rows of a batch.
        rows: samples of this rank.
        views: views of each sample.
        row_bytes: bytes of one stored row.
        rows_rewritten: rows that lie in the file which is to be completed, and is written anew for that.
        epochs_left: how often all samples are still asked for, as a fraction; each time in the next view.
        epochs_until_move: until the cut is expected to move again; infinity when it is fixed.
        passed: the part of the epoch under way that is over.
        present: of the samples in each of the next `views` epochs, beginning with the one under way, the part that is
            cached already; empty is none.
        sources: the same of rows that are cached at a shallower cut.
        all_at_once: what is missing is computed before training goes on.
        source_spares: seconds of a batch that beginning with those rows spares.
        memory_bytes: that the page cache may take for this rank.
        rates: of this rank's cache directory.
    """

    image_seconds: float
    prefix_seconds: float
    suffix_seconds: float
    batch_rows: int
    rows: int
    views: int
    row_bytes: int
    epochs_left: float
    memory_bytes: int
    rates: Rates
    rows_rewritten: int = 0
    epochs_until_move: float = math.inf
    passed: float = 0.0
    present: tuple[float, ...] = ()
    sources: tuple[float, ...] = ()
    source_spares: float = 0.0
    all_at_once: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows of this rank."""
        return self.rows * self.views * self.row_bytes

    @property
    def rows_present(self) -> int:
        """Rows that are cached already."""
        return round(sum(self.present) * self.rows)

    @property
    def rows_missing(self) -> int:
        """Rows that are not cached yet."""
        return max(0, self.rows * self.views - self.rows_present)

    @property
    def new_bytes(self) -> int:
        """Bytes that completing the cache allocates; none where it is complete."""
        return (self.rows_missing + self.rows_rewritten) * self.row_bytes if self.rows_missing else 0

    @property
    def compute_seconds(self) -> float:
        """What a batch costs without the cache and is spared with it."""
        return self.image_seconds + self.prefix_seconds

    @property
    def read_seconds(self) -> float:
        """What reading a batch adds to a step: the core that it takes, and what reading ahead cannot hide."""
        batch_bytes = self.batch_rows * self.row_bytes
        total = self.rates.read_warm if self.num_bytes <= self.memory_bytes else self.rates.read_cold
        waiting = (total - self.rates.read_cpu) * batch_bytes
        return self.rates.read_cpu * batch_bytes + max(0.0, waiting - self.suffix_seconds)

    @property
    def write_seconds(self) -> float:
        """What storing a batch adds to a step, in the same way."""
        batch_bytes = self.batch_rows * self.row_bytes
        waiting = (self.rates.write - self.rates.write_cpu) * batch_bytes
        hidden_behind = self.suffix_seconds + self.compute_seconds
        return self.rates.write_cpu * batch_bytes + max(0.0, waiting - hidden_behind)
