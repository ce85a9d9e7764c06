"""Where a parameter's gradient lies in the flat buffer that travels."""

from __future__ import annotations

from torch import Tensor, nn


def place_in(flat: Tensor, parameter: nn.Parameter, offset: int) -> Tensor:
    """Return the part of `flat`, from `offset` on, that has the gradient of `parameter`.

    It has the parameter's own strides: a channels_last weight keeps its format in the flat buffer. It shares the memory
    of `flat`, but to PyTorch it is no view: scripts may call `detach_()` on gradients, which PyTorch refuses for views.
    """
    place: Tensor = flat.new_empty(0).set_(flat.untyped_storage(), offset, parameter.size(), parameter.stride())
    return place
