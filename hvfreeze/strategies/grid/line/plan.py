"""How batches go through a line: who runs which blocks, in which order, and what need not come through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hvfreeze.chain.segments import Boundary, Segment
from hvfreeze.data.batches import Batch


class Source(Protocol):
    """What is cached of the batches that come into the line; see `AsRows` in entry.py."""

    depth: int
    reader: int

    def cached(self, batch: Batch) -> bool:
        """Tell whether a batch is read, so that nothing of it comes through the line."""

    def read(self, batch: Batch, came: Tensor | None) -> Tensor:
        """Return on the reader the features of a batch; `came` is what has come through the line, if it had to."""


@dataclass(frozen=True)
class Plan:
    """Who runs which blocks, and how a batch goes through them; the same on all ranks."""

    segments: tuple[Segment, ...]
    """By partition."""
    micro_batches: int
    schedule: str
    """One of `SCHEDULES`."""

    def bytes_per_step(self, boundaries: Sequence[Boundary], *, cut: int) -> dict[str, int]:
        """Return what the ranks of one line send for a batch, whose boundaries these are, by lane."""
        inner = [start for start, _ in self.segments[1:]]
        return {
            "activations": sum(boundaries[depth].num_bytes for depth in inner),
            "errors": sum(boundaries[depth].num_bytes for depth in inner if depth > cut),
        }
