"""The head itself: a projection, the training rows as centres, and how much each of them says for each class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MOST_DIRECTIONS = 512
"""Of the features, in which rows are compared."""


class KernelHead(nn.Module):
    """Features, (B, D), to logits, (B, C): over all centres z, exp(-|P x + p - z|^2) times its weight for the class.

    Attributes:
        in_features: D.
        out_features: C.
        projection: P, (K, D) float32, K = min(D, `MOST_DIRECTIONS`); standardisation and bandwidth are folded in.
        shift: p, (K,) float32.
        centres: (N, K) float32, the training rows of all ranks.
        weight: (C, N) float32.
    """

    projection: Tensor
    shift: Tensor
    centres: Tensor

    def __init__(self, in_features: int, out_features: int) -> None:
        """Take D and C; until it is solved, there are no centres and the head says nothing."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        width = min(in_features, MOST_DIRECTIONS)
        self.register_buffer("projection", torch.zeros(width, in_features))
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("centres", torch.zeros(0, width))
        self.weight = nn.Parameter(torch.zeros(out_features, 0))

    def hold(self, rows: int) -> None:
        """Make room for `rows` centres, to be filled."""
        self.centres = self.centres.new_zeros(rows, self.centres.shape[1])
        self.weight.data = self.weight.new_zeros(self.out_features, rows)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits, float32."""
        # Distances are small differences of large products: bfloat16 would leave nothing of them.
        with torch.autocast("cpu", enabled=False):
            points = functional.linear(features.float(), self.projection, self.shift)
            return functional.linear(gaussian(points, self.centres), self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        centres = state_dict.get(f"{prefix}centres")
        if isinstance(centres, Tensor) and len(centres) != len(self.centres):
            self.hold(len(centres))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def gaussian(points: Tensor, centres: Tensor) -> Tensor:
    """Return exp(-|a - z|^2), (A, N), for `points`, (A, K), and `centres`, (N, K)."""
    exponents = torch.addmm(-centres.square().sum(1), points, centres.t(), alpha=2)
    # In place: matrices of this size cost more to get memory for than to compute.
    return exponents.sub_(points.square().sum(1, keepdim=True)).clamp_(max=0).exp_()
