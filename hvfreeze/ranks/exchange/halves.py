"""float16 on the wire without lost gradients: values are scaled by an exact power of two that all ranks know.

Near convergence most gradients, divided by the number of ranks, are below float16's smallest number, and would arrive
as zero. So a bucket's values are scaled up until the largest of all ranks' is 1/16 of what may travel. All ranks must
take the same scale before they know each other's gradients: it follows the last step's. Each rank's largest exponent
travels behind the bucket, one float16 a rank; where one was too large for the scale, or all were much too small, all
ranks see it, and send this bucket again in full precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TOP = 15
"""All ranks' sum stays below 2^15 where every rank's largest value, before the division by their number, does."""
HEADROOM = 4
BOTTOM = TOP - HEADROOM - 12
"""Below, what is smaller than the largest value by a factor of a thousand would have few bits left, or none."""
LARGEST_SCALE = 64
"""As a power of two: a gradient that is unexpectedly large, 1e19, stays within float32. Below 1e-20 all is resent."""
NOT_FINITE, ALL_ZERO = 2000.0, -2000.0


class HalfCopy:
    """The float16 copy of a bucket, with every rank's largest exponent behind it.

    Args:
        numel: elements of the bucket.
        names: of its parameters.
        exponents: what the last step's gradients were below, as a power of two, by parameter; it is read and written
            here, and kept by the owner, because a bucket lives only until the cut moves.
    """

    def __init__(self, numel: int, names: Sequence[str], *, rank: int, size: int, exponents: dict[str, int]) -> None:
        self._wire = torch.zeros(numel + size, dtype=torch.float16)
        self.values, self._tops = self._wire[:numel], self._wire[numel:]
        self._names, self._rank, self._size, self._exponents = names, rank, size, exponents
        self._shift, self.fitted = 0, False

    @property
    def tail_bytes(self) -> int:
        """What travels beside the values."""
        return self._tops.nbytes

    def next_scale(self) -> float:
        """Choose the step's scale, a power of two, from what is known; the same on all ranks."""
        known = [self._exponents[name] for name in self._names if name in self._exponents]
        # A parameter of which nothing is known yet may have any gradient: as if it were 1.
        expected = max(known) if len(known) == len(self._names) else max([*known, 0])
        self._shift = max(-LARGEST_SCALE, min(LARGEST_SCALE, TOP - HEADROOM - expected))
        return 2.0**self._shift

    def filled_from(self, flat: Tensor) -> Tensor:
        """Return what travels for the scaled values in `flat`, which this rank has divided by the number of ranks."""
        self.values.copy_(flat)
        self._tops.zero_()
        low, high = torch.aminmax(flat)
        largest = max(-float(low), float(high)) * self._size if len(flat) else 0.0
        exponent = math.frexp(largest)[1] if largest else ALL_ZERO
        self._tops[self._rank] = exponent if math.isfinite(largest) else NOT_FINITE
        return self._wire

    def misfitted(self) -> bool:
        """Tell, when the sum has arrived, whether the scale did not fit the values; learn for the next step."""
        top = float(self._tops.max())
        if ALL_ZERO < top < NOT_FINITE:
            self._exponents.update(dict.fromkeys(self._names, int(top) - self._shift))
        self.fitted = top <= TOP and not ALL_ZERO < top < BOTTOM
        return not self.fitted

    def unscale(self, flat: Tensor) -> None:
        """Undo the scale in the sum; exact."""
        if self._shift:
            flat.mul_(2.0**-self._shift)
