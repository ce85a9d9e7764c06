"""Detects parameters of a model that other code changes: another optimizer, or an average that a script keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from hvfreeze.freezing.frozen_prefix import FrozenPrefix

LOOKED_AT = 4096
"""Maximum number of elements of a parameter to compare, in addition to the sum of all."""


class ChangedElsewhere:
    """Watches the parameters of a model that its optimizer does not hold."""

    def __init__(self, prefix: FrozenPrefix) -> None:
        """Store their current values."""
        held = {parameter for group in prefix.groups for parameter in group}
        self._prefix = prefix
        self._before = {
            name: looked_at(parameter)
            for name, parameter in prefix.chain.model.named_parameters()
            if parameter not in held
        }

    def first(self) -> tuple[int, str] | None:
        """Return the first trained block with a changed parameter, and the parameter's name; None if there is none."""
        chain = self._prefix.chain
        for block in range(self._prefix.cut, len(chain.blocks)):
            for name, parameter in chain.named_parameters(block, block + 1):
                before = self._before.get(name)
                if before is not None and not torch.equal(before, looked_at(parameter)):
                    return block, name
        return None


def looked_at(parameter: Tensor) -> Tensor:
    """Return some elements of `parameter` and the sum of all, (E + 1,), as bits, so that NaN equals itself."""
    flat = parameter.detach().reshape(-1).double()
    some = flat[:: max(1, len(flat) // LOOKED_AT)]
    return torch.cat([some, flat.sum()[None]]).view(torch.int64)
