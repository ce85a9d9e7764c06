"""What a rank observes of its own training between two votes: gradient sums per block."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvfreeze.chain.blocks import Chain


@dataclass
class GradientSums:
    """Vector sums of the gradients of the blocks from the cut up to the head, over one interval.

    `add` is called for each parameter in each step; `norms` reads the interval's result per block.
    With `step_norms` the squared norm of every single step is kept too, for the signal-to-noise weight.
    """

    chain: Chain
    step_norms: bool = False
    cut: int = 0
    steps: int = 0
    squared_steps: float = 0.0
    _sums: list[Tensor] = field(default_factory=list)
    _block_of: list[int] = field(default_factory=list)

    def restart(self, cut: int) -> None:
        """Begin an empty interval at `cut`."""
        if cut != self.cut or not self._block_of:
            self.cut = cut
            blocks = range(cut, len(self.chain.blocks) - 1)
            owners = [(block, p) for block in blocks for _, p in self.chain.named_parameters(block, block + 1)]
            self._block_of = [block for block, _ in owners]
            self._sums = [torch.zeros_like(p) for _, p in owners]
        self.steps = 0
        self.squared_steps = 0.0

    def add(self, slot: int, gradient: Tensor) -> None:
        """Add the gradient of the `slot`-th parameter from the cut on; the head's are left out."""
        if slot >= len(self._sums):
            return
        if self.steps == 0:
            self._sums[slot].copy_(gradient)
        else:
            self._sums[slot].add_(gradient)
        if self.step_norms:
            self.squared_steps += float(torch.linalg.vector_norm(gradient)) ** 2

    def step_done(self) -> None:
        """Count a step as complete."""
        self.steps += 1

    def norms(self) -> tuple[float, ...]:
        """Return per block of the whole chain the norm of its summed gradient, 0 for blocks not observed."""
        squares = [0.0] * len(self.chain.blocks)
        if self.steps:
            for block, total in zip(self._block_of, self._sums, strict=True):
                squares[block] += float(torch.linalg.vector_norm(total, dtype=torch.float64)) ** 2
        return tuple(math.sqrt(square) for square in squares)

    def signal_to_noise(self) -> float:
        """Return |mean gradient|^2 / mean |gradient|^2 over the interval: 1 when steps agree, 1/steps when random."""
        if self.steps == 0 or self.squared_steps == 0:
            return 0.0
        total = sum(norm**2 for norm in self.norms())
        return total / self.steps / self.squared_steps

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's accumulators; the sums only where an interval has begun."""
        sums = [total.clone() for total in self._sums] if self.steps else []
        return {"cut": self.cut, "steps": self.steps, "squared_steps": self.squared_steps, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from accumulators that `state_dict` returned."""
        self.restart(state["cut"])
        self.steps = state["steps"]
        self.squared_steps = state["squared_steps"]
        for mine, saved in zip(self._sums, state["sums"], strict=False):
            mine.copy_(saved)
