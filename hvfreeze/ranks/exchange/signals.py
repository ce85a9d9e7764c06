"""What all ranks learn in a step beside gradients: four integers, summed while the backward pass runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvfreeze.errors import DivergedError
from hvfreeze.ranks.world import World

SIGNAL_BYTES = 32
"""That a rank hands over in a step."""


@dataclass(frozen=True)
class Signals:
    """What all ranks learn in a step, summed over ranks."""

    nonfinite: int
    leave: int


class Header:
    """A step's signals on their way, with a hash of the parameters that this rank carries."""

    def __init__(self, world: World, set_hash: int, *, nonfinite: bool, leave: bool) -> None:
        self._world = world
        self._values = torch.tensor([int(nonfinite), int(leave), set_hash, set_hash**2], dtype=torch.int64)
        self._handle: Any = world.start_allreduce_(self._values, name="step.signals")

    def wait(self) -> Signals:
        """Return what all ranks signalled. Collective.

        Raises:
            DivergedError: the ranks carry different sets of parameters.
        """
        self._world.wait(self._handle)
        nonfinite, leave, total, squares = self._values.tolist()
        # Equality in Cauchy-Schwarz: n * sum(h^2) = (sum h)^2 only where all h are equal.
        if self._world.size * squares != total**2:
            raise DivergedError(
                "ranks disagree on which parameters are frozen; freeze and thaw through the Freezer, on all ranks"
            )
        return Signals(nonfinite=nonfinite, leave=leave)


def hash_of_names(names: Sequence[str]) -> int:
    """Return a non-negative number below 2^24 that depends on the names and their order."""
    return int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:3], "big")
