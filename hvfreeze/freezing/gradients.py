"""A rank's observations between two votes: gradient sums per block, and the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.freezing.frozen_prefix import FrozenPrefix

Join = Callable[[Sequence[float]], list[float]]
"""Sums the observations of ranks that hold different blocks."""


@dataclass
class GradientSums:
    """Vector sums of the gradients of the blocks from the cut up to the head, over one interval."""

    prefix: FrozenPrefix
    step_norms: bool = False
    """Whether to sum the squared norms of all steps too, for the signal-to-noise weight."""
    join: Join = list
    """Sums over the ranks that hold the other blocks; a collective among them."""
    steps: int = 0
    squared_steps: float = 0.0
    _sums: list[Tensor] = field(default_factory=list)
    _added: list[bool] = field(default_factory=list)
    """For each sum, whether it contains a gradient of this interval; if not, its value is arbitrary and counts as 0."""
    _squares: list[float] | None = None
    """Squared norm of the current sum per block; None if not computed."""
    _block_of: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Start an empty interval at another cut."""
        chain, (start, stop) = self.prefix.chain, self.prefix.held
        blocks = range(max(self.prefix.cut, start), min(stop, len(chain.blocks) - 1))
        self._block_of = [block for block in blocks for _ in self.prefix.trained(block, block + 1)]
        # Empty until a gradient is added: without votes, no sums as large as the model are allocated.
        self._sums = [torch.zeros(0) for _ in self._block_of]
        self.restart()

    def restart(self) -> None:
        """Start an empty interval."""
        self._added, self._squares = [False] * len(self._sums), None
        self.steps, self.squared_steps = 0, 0.0

    def add(self, slot: int, gradient: Tensor) -> None:
        """Add the gradient of the `slot`-th trained parameter from the cut on; the head's are left out."""
        if slot >= len(self._sums):
            return
        if self._sums[slot].shape != gradient.shape:
            self._sums[slot], self._added[slot] = torch.empty_like(gradient), False
        # Copy the first gradient: zeroing the sums, which are as large as the model, takes as long as adding.
        self._sums[slot].add_(gradient) if self._added[slot] else self._sums[slot].copy_(gradient)
        self._added[slot], self._squares = True, None
        if self.step_norms:
            self.squared_steps += float(torch.linalg.vector_norm(gradient)) ** 2

    def norms(self) -> tuple[float, ...]:
        """Return the norm of the summed gradient per block of the whole chain, 0 for blocks without observations."""
        squares = self.squares() if self.steps else [0.0] * len(self.prefix.chain.blocks)
        return tuple(math.sqrt(square) for square in self.join(squares))

    def squares(self) -> list[float]:
        """Return the squared norms per block of this rank's sums; cached until a gradient is added."""
        if self._squares is None:
            self._squares = [0.0] * len(self.prefix.chain.blocks)
            for block, total, added in zip(self._block_of, self._sums, self._added, strict=True):
                if added:
                    self._squares[block] += float(torch.linalg.vector_norm(total, dtype=torch.float64)) ** 2
        return self._squares

    def signal_to_noise(self) -> float:
        """Return |mean gradient|^2 / mean |gradient|^2 over the interval: 1 when steps agree, 1/steps when random."""
        total = sum(norm**2 for norm in self.norms())
        (squared_steps,) = self.join([self.squared_steps])
        return total / self.steps / squared_steps if self.steps and squared_steps else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's accumulators; the sums only if an interval has begun."""
        summed = zip(self._sums, self._added, strict=True) if self.steps else ()
        sums = [total.clone() if added else torch.zeros_like(total) for total, added in summed]
        return {"cut": self.prefix.cut, "steps": self.steps, "squared_steps": self.squared_steps, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load accumulators that `state_dict` returned at the same cut."""
        self.steps = state["steps"]
        self.squared_steps = state["squared_steps"]
        for slot, saved in enumerate(state["sums"]):
            self._sums[slot], self._added[slot] = saved.clone(), True
        self._squares = None


@dataclass
class Observations:
    """A rank's observations in the current interval, and the norms of the last two."""

    sums: GradientSums
    source: str
    """Gradients to observe: `local`, this rank's own; `averaged`, those of all ranks; or `none`."""
    norms: list[tuple[float, ...]] = field(default_factory=list)
    """Norms per block of the last complete intervals at this cut, at most two."""
    loss_sum: float = 0.0
    loss_steps: int = 0

    @property
    def mean_loss(self) -> float:
        """The mean loss over the steps of the interval."""
        (loss_sum,) = self.sums.join([self.loss_sum])
        return loss_sum / max(self.loss_steps, 1)

    @property
    def broken(self) -> bool:
        """Whether a norm is NaN or Inf, so that it must not be used."""
        return not all(math.isfinite(norm) for norms in self.norms for norm in norms)

    @property
    def last_two(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """(previous, current) norms if both intervals are complete, else (None, None)."""
        return (self.norms[0], self.norms[1]) if len(self.norms) == 2 else (None, None)

    @property
    def observer(self) -> Callable[[int, Tensor], None] | None:
        """Observer of this rank's gradients, by their index among the carried parameters; None if there is none."""
        return self.sums.add if self.source == "local" else None

    def add_step(self, loss: float, carried: Callable[[], Sequence[tuple[str, nn.Parameter]]]) -> None:
        """Count a step with its mean loss and, if averaged gradients are observed, those of `carried`."""
        self.loss_sum += loss
        self.loss_steps += 1
        if self.source == "averaged":
            for slot, (_, parameter) in enumerate(carried()):
                if parameter.grad is not None:
                    self.sums.add(slot, parameter.grad)
        if self.source != "none":
            self.sums.steps += 1

    def end_interval(self) -> None:
        """Store the norms of the complete interval."""
        if self.source != "none":
            self.norms = [*self.norms, self.sums.norms()][-2:]

    def begin_interval(self) -> None:
        """Start an empty interval."""
        self.sums.restart()
        self.loss_sum, self.loss_steps = 0.0, 0

    def forget(self) -> None:
        """Restart the gradient sums at another cut, because norms of other blocks are not comparable."""
        self.sums.begin()
        self.norms = []

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's observations as plain values and tensors."""
        return {
            "sums": self.sums.state_dict(),
            "norms": [list(norms) for norms in self.norms],
            "loss": [self.loss_sum, self.loss_steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`."""
        self.sums.load_state_dict(state["sums"])
        self.norms = [tuple(norms) for norms in state["norms"]]
        self.loss_sum, self.loss_steps = state["loss"]
