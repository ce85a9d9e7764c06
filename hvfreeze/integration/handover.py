"""Parameters that a script wraps once more, as for another phase of training: the later optimizer has them."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor


class Holder(Protocol):
    """An optimizer that averages gradients of parameters."""

    def parameters(self) -> set[Tensor]:
        """Return all that it has, the frozen ones too."""

    def let_go(self) -> None:
        """Leave them alone from now on, as if they had never been wrapped."""


_holders: list[weakref.ref[Holder]] = []
"""In the order in which they came. Hooks on its parameters keep each alive as long as these are, on all ranks."""


def take_over(holder: Holder) -> None:
    """Let every earlier holder of one of the parameters of `holder` go: two would average the same gradients twice."""
    own = holder.parameters()
    for reference in list(_holders):
        earlier = reference()
        if earlier is None or earlier.parameters() & own:
            _holders.remove(reference)
            if earlier is not None:
                earlier.let_go()
    _holders.append(weakref.ref(holder))
