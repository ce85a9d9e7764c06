"""The history of the cut, as runs record it."""

from __future__ import annotations

from typing import NamedTuple


class Move(NamedTuple):
    """A change of the cut; in files the list [epoch, step, cut]."""

    epoch: int
    step: int
    """Optimizer steps made before the change."""
    cut: int
    """Blocks that are frozen from then on."""
