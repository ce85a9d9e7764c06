"""A chain before and behind a cut."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hvfreeze.model.blocks import Chain
from hvfreeze.model.traced import Inputs
from hvfreeze.prefix.splits import prefix_digest


class Halves:
    """The two parts of a chain, whose blocks run one after another; `inputs` are the model's, as `call` takes them.

    Attributes:
        runs_inside: whether blocks run inside the model's own forward pass, which takes the inputs.
        needs_inputs: whether the part behind the cut looks at numbers of a floating type among the inputs.
    """

    runs_inside = False
    needs_inputs = False

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def check(self, inputs: Inputs, cut: int) -> None:
        """Raise UsageError where the parts at `cut` do not give what the model gives for `inputs`.

        A chain was compared with its model when it was made.
        """

    def before(self, x: Any, start: int, stop: int, inputs: Inputs) -> Tensor:
        """Return the output of blocks start..stop-1 for `x`, the input of block `start`, which is `inputs` at 0."""
        return self._chain.run(x if isinstance(x, Tensor) else x[0], start, stop)

    def after(self, x: Tensor, kept: Sequence[Tensor], cut: int) -> Any:
        """Return what the model gives, from the output `x` of its first `cut` blocks and what `kept` returned."""
        return self._chain.run(x, cut, len(self._chain.blocks))

    def kept(self, inputs: Inputs) -> list[Tensor]:
        """Return of these inputs what the part behind the cut is given, (B, ...) each; nothing in a chain."""
        return []

    def digest(self, cut: int) -> str:
        """Return a digest of the tensors that the part before `cut` computes with."""
        return prefix_digest(self._chain, cut)


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context in which blocks compute as the script does under `torch.autocast("cpu", dtype)`."""
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
