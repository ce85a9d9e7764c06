"""The two parts of a chain, before and behind a cut."""

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
        needs_inputs: whether the part behind the cut uses floating-point inputs.
    """

    runs_inside = False
    needs_inputs = False

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def check(self, inputs: Inputs, cut: int) -> None:
        """Raise UsageError if the parts at `cut` do not give the model's output for `inputs`.

        A chain does nothing: it was compared with its model when it was created.
        """

    def before(self, x: Any, start: int, stop: int, inputs: Inputs) -> Tensor:
        """Return the output of blocks start..stop-1 for `x`, the input of block `start`, which is `inputs` at 0."""
        return self._chain.run(x if isinstance(x, Tensor) else x[0], start, stop)

    def after(self, x: Tensor, kept: Sequence[Tensor], cut: int) -> Any:
        """Return the model's output, from the output `x` of its first `cut` blocks and the result of `kept`."""
        return self._chain.run(x, cut, len(self._chain.blocks))

    def kept(self, inputs: Inputs) -> list[Tensor]:
        """Return the inputs that the part behind the cut needs, (B, ...) each; none in a chain."""
        return []

    def digest(self, cut: int) -> str:
        """Return a digest of the tensors that the part before `cut` uses."""
        return prefix_digest(self._chain, cut)


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context in which blocks compute as the script does under `torch.autocast("cpu", dtype)`."""
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
