"""Estimates the gain of training each block from the agreement of gradients of different samples.

For gradients g, h of different samples, <g, h> is an unbiased estimate of |E g|^2: the gain of a step on unseen
samples, to first order and per unit of the learning rate. The rest of |g|^2 is noise. Sources: gradient signal-to-noise
ratio (Liu et al., "Understanding Why Neural Networks Generalize Well Through GSNR of Parameters", ICLR 2020); coherent
gradients (Chatterjee, ICLR 2020).

Ranks compute gradients of different samples. So rank r needs no message: its estimate is (n <g_r, avg> - |g_r|^2) /
(n - 1), from its own gradient and the average over all n ranks. A single rank multiplies its gradients of two
consecutive steps. So does each rank if low-rank compression makes the average inexact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.comm.reducer import Reducer
from hvfreeze.freezing.frozen_prefix import FrozenPrefix
from hvfreeze.freezing.gradients import Join

PIECE = 2**15
"""Number of elements of a large parameter that are sampled in one step; one with fewer than twice as many is sampled
whole. Every sampled step uses another piece, so the estimate is unbiased and costs less than 1 % of the step."""
BATCH_EVERY = 16
"""Steps of an interval for which a gradient probe of frozen blocks gets one batch."""
LEAST_PARTS = 4
"""Minimum number of gradients, each of other samples, that a probe compares."""
STEP_EVERY = 64
"""Steps of an interval for which one backward pass of training reaches frozen blocks, if `probe` is not called."""
LONGEST_GAP = 16
"""Largest number of steps between two samples; at least two."""
WINDOW = 32
"""Minimum number of sampled steps in an estimate; if two intervals have fewer, earlier ones are used too."""
Gains = tuple[tuple[float, ...], ...]
"""One row per sampled step, one number per block; 0 for blocks that are not trained."""


def gap(interval: int) -> int:
    """Return the number of steps between two sampled steps, for intervals of `interval` steps."""
    return min(max(2, interval // 16), LONGEST_GAP)


def piece(tensor: Tensor, turn: int, *, like: Tensor) -> tuple[Tensor, float]:
    """Return piece `turn` of `tensor`, in the memory order of `like`, and the ratio of all elements to those in it."""
    flat = tensor.reshape(-1) if like.is_contiguous() or tensor.dim() != 4 else tensor.permute(0, 2, 3, 1).reshape(-1)
    pieces = max(1, len(flat) // PIECE)
    first = turn % pieces * PIECE
    part = flat[first : first + PIECE] if pieces > 1 else flat
    return part, len(flat) / max(1, len(part))


def rate_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], *, elements: int, norm: float) -> float:
    """Return the approximate ratio of the optimizer's update to a gradient with `elements` elements and norm `norm`.

    For SGD it is the learning rate. Adam and similar optimizers divide by the size of past gradients, so the update is
    about the rate per element, whatever the norm. Constant factors, such as that of momentum, are ignored, because only
    blocks are compared with each other.
    """
    lr = float(group["lr"])
    return lr if isinstance(optimizer, torch.optim.SGD) else lr * math.sqrt(elements) / max(norm, 1e-30)


@dataclass
class Coherence:
    """Samples the gain of a step for the blocks that train; see the module.

    Attributes:
        latest: rows of the current interval, one per sample, from the same steps on all ranks; NaN if a sample is
            unusable.
        complete: rows of the last complete intervals at this cut: two, or as many as have `WINDOW` samples.
        peaks: the largest mean gain of each block in any interval so far.
        probes: gains of all blocks, including frozen ones, from up to two probes in consecutive intervals.
    """

    prefix: FrozenPrefix
    optimizer: torch.optim.Optimizer
    reducer: Reducer
    every: int
    """Steps between two samples."""
    join: Join = list
    """Sums over the ranks that hold the other blocks; a collective among them."""
    latest: list[list[float]] = field(default_factory=list)
    complete: list[Gains] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    probes: list[Gains] = field(default_factory=list)
    intervals: int = 0
    """Number of complete intervals at this cut."""
    next_probe: int = 2
    """The interval at whose end frozen blocks are probed; the distance doubles after each pair of probes."""
    steps: int = 0
    """Steps in the current interval."""
    turn: int = 0
    """Number of samples, which selects the next piece."""
    probing: bool = False
    """Whether the backward pass of the current step reaches frozen blocks."""
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    """Sums of this rank's gradient pieces in the probing steps of the interval, by parameter name."""
    _blocks: dict[str, int] = field(default_factory=dict)
    """Blocks of the parameters that train, by parameter name."""
    _kept: dict[str, Tensor] = field(default_factory=dict)
    """Pieces of this rank's own gradients."""
    _products: dict[str, tuple[float, float]] = field(default_factory=dict)
    """<g, h> and |h|^2 of the current sample, for whole parameters."""
    _part: dict[str, Tensor] = field(default_factory=dict)
    """Gradient pieces of the current probing step, by parameter name."""
    _part_of: int = -1
    """The reducer's step that `_part` belongs to, so that pieces of a skipped step are dropped."""
    _taken: Counter[str] = field(default_factory=Counter)
    """Number of backward passes of that step that have reached each frozen parameter."""

    @property
    def gains(self) -> Gains | None:
        """Rows of the complete intervals, oldest first; None until there are two intervals."""
        return tuple(row for rows in self.complete for row in rows) if len(self.complete) > 1 else None

    def follow(self) -> None:
        """Restart at the current cut of the prefix; keep the peaks."""
        chain, (start, stop) = self.prefix.chain, self.prefix.held
        blocks = range(max(self.prefix.cut, start), stop)
        self._blocks = {name: block for block in blocks for name, _ in self.prefix.trained(block, block + 1)}
        if len(self.peaks) != len(chain.blocks):
            self.peaks = [0.0] * len(chain.blocks)
        self.complete, self.probes, self.intervals, self.next_probe = [], [], 0, 2
        self.restart()

    def restart(self) -> None:
        """Start an empty interval."""
        self.steps, self.latest = 0, []
        self.probes = self.probes if len(self.probes) < 2 else []
        self._kept, self._products = {}, {}
        self.probing, self.parts = False, []

    def observe(self, slot: int, gradient: Tensor) -> None:
        """Sample this rank's gradient of the `slot`-th carried parameter, before it is averaged."""
        name, parameter = self.reducer.carried[slot]
        if self.probing and name in self._blocks:
            self._sample_frozen(name, parameter, gradient)
        if self.steps % self.every == 0:
            # Replaces the piece of a skipped step, e.g. one with infinite gradients.
            if name in self._blocks:
                self._kept[name] = piece(gradient, self.turn, like=parameter)[0].clone()
        elif name in self._kept:
            self._multiply(name, parameter, gradient)

    def take(self, name: str, gradient: Tensor) -> bool:
        """Sample the gradient of a frozen parameter in one backward pass; return True if it was the step's last."""
        whole = gradient.to_dense() if gradient.is_sparse else gradient
        self._sample_frozen(name, self.prefix.chain.model.get_parameter(name), whole)
        self._taken[name] += 1
        return self._taken[name] >= self.reducer.passes

    def compare(self) -> None:
        """Sample the averaged gradients, if ranks are compared."""
        if self._across and self.steps % self.every == 0:
            for name, parameter in self.reducer.carried:
                if name in self._kept and parameter.grad is not None:
                    self._multiply(name, parameter, self.reducer.average_of(parameter.grad))

    def end_step(self, *, scale: float = 1.0) -> None:
        """Count a step, and store its sample if that is complete.

        `scale` is the loss scale of the sampled gradients of this step.
        """
        if self.probing:
            self._keep_part(scale)
        if self._completes:
            # A rank whose blocks are all frozen has nothing to add.
            found = bool(self._products) or not self._blocks
            self.latest.append(self._by_block(scale) if found else [math.nan] * len(self.prefix.chain.blocks))
            self._kept, self._products = {}, {}
            self.turn += 1
        elif scale != 1.0:
            for gradient in self._kept.values():
                gradient.div_(scale)
        self.steps += 1

    def end_interval(self) -> None:
        """Store the samples of the interval that are finite on all ranks.

        Collective if other ranks hold some of the blocks.
        """
        self.intervals += 1
        each, flat = 1 + len(self.prefix.chain.blocks), [1.0]
        for row in self.latest:
            flat += [1.0, *row] if all(map(math.isfinite, row)) else [0.0] * each
        ranks, *flat = self.join(flat)
        # Rows that are finite on all ranks.
        starts = [first for first in range(0, len(flat), each) if flat[first] == ranks]
        rows = tuple(tuple(flat[first + 1 : first + each]) for first in starts)
        self.complete.append(rows)
        while len(self.complete) > 2 and sum(map(len, self.complete[1:])) >= WINDOW:
            self.complete.pop(0)
        if rows:
            means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
            self.peaks = [max(peak, mean) for peak, mean in zip(self.peaks, means, strict=True)]

    @property
    def probe_is_due(self) -> bool:
        """Whether frozen blocks are to be probed before the current interval ends."""
        return self.prefix.cut > 0 and self.intervals + 1 >= self.next_probe

    def probe(self, losses: Iterable[Tensor]) -> None:
        """Probe all blocks, including frozen ones, with the gradients of `losses`; training is unaffected.

        Each loss must be of other samples. `losses` is consumed one at a time, while frozen parameters require
        gradients. With fewer than two losses, the probe gives no gains.
        """
        chain = self.prefix.chain
        named = self.prefix.trained(0, len(chain.blocks))
        frozen = [parameter for _, parameter in named if not parameter.requires_grad]
        parts: list[dict[str, Tensor]] = []
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            for loss in losses:
                found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True, materialize_grads=True)
                pieces = zip(found, named, strict=True)
                parts.append({name: piece(of, self.turn, like=p)[0].clone() for of, (name, p) in pieces})
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        enough = len(parts) > 1
        self._add_probe(self._gains_of(parts, summed(parts), count=len(parts)) if enough else ())
        self.turn += 1

    def end_probe(self) -> None:
        """Compare the gradients of the interval's probing steps; call it before `end_interval`.

        They are compared with the mean of all other ranks, which have other samples; a single rank compares its own
        steps. Collective.
        """
        parts = self.parts
        whole, count = summed(parts), len(parts)
        local = whole if self.reducer.world.size > 1 else None
        if local is not None:
            whole, count = self._over_ranks(whole, count)
        enough = len(parts) >= LEAST_PARTS and (local is None or count - len(parts) >= LEAST_PARTS)
        self._add_probe(self._gains_of(parts, whole, count=count, local=local) if enough else ())

    def _over_ranks(self, local: dict[str, Tensor], count: int) -> tuple[dict[str, Tensor], int]:
        """Return the sums over ranks of all pieces, and of their numbers of gradients. Collective."""
        named = self.prefix.trained(0, len(self.prefix.chain.blocks))
        empty = {name: torch.zeros_like(piece(p.detach(), self.intervals, like=p)[0]) for name, p in named}
        pieces = [local.get(name, empty[name]).float() for name, _ in named]
        sent = torch.cat([torch.tensor([float(count)]), *pieces])
        self.reducer.other_bytes += sent.nbytes
        sums = self.reducer.world.allreduce_sum(sent, name=f"{self.reducer.title}look")
        counts, *wholes = sums.split([1, *map(len, pieces)])
        return {name: of.to(empty[name].dtype) for (name, _), of in zip(named, wholes, strict=True)}, int(counts)

    def _add_probe(self, rows: Gains) -> None:
        self.probes.append(rows)
        interval = self.intervals + 1
        self.next_probe = interval + 1 if len(self.probes) == 1 else 2 * interval

    def _gains_of(
        self,
        parts: Sequence[dict[str, Tensor]],
        whole: dict[str, Tensor],
        *,
        count: int,
        local: dict[str, Tensor] | None = None,
    ) -> Gains:
        """Return a row per part: the products of its gradients with the mean of the others.

        Args:
            parts: this rank's gradients.
            whole: the sum of these and, if any, of those of other ranks.
            count: number of gradients in `whole`.
            local: the sum of this rank's gradients, to compare only with those of other ranks; None compares each part
                with all others.
        """
        chain = self.prefix.chain
        named = [(b, *of) for b in range(len(chain.blocks)) for of in self.prefix.trained(b, b + 1)]
        group_of = {
            p: g for g, group in zip(self.optimizer.param_groups, self.prefix.groups, strict=True) for p in group
        }
        rows, others = [[0.0] * len(chain.blocks) for _ in parts], count - (1 if local is None else len(parts))
        for block, name, p in named:
            # Parts in whose loss the parameter took no part have no gradient of it.
            found = [(row, part[name]) for row, part in zip(rows, parts, strict=True) if name in part]
            if not found:
                continue
            total = whole[name]
            times = p.numel() / max(1, total.numel())
            norm = math.sqrt(times) * float(torch.linalg.vector_norm(total)) / count
            rate = rate_of(self.optimizer, group_of[p], elements=p.numel(), norm=norm)
            for row, own in found:
                other = total - (own if local is None else local[name])
                row[block] += rate * times * float(torch.dot(own, other)) / others
        return tuple(map(tuple, rows))

    def _sample_frozen(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        """Add a piece of a gradient, the same in all steps of an interval, to the sum over this step's passes."""
        if self._part_of != self.reducer.steps:
            self._part, self._taken, self._part_of = {}, Counter(), self.reducer.steps
        own = piece(gradient.detach(), self.intervals, like=parameter)[0]
        self._part[name] = self._part[name] + own if name in self._part else own.clone()

    def _keep_part(self, scale: float) -> None:
        """Keep this step's gradients, unless they contain NaN or Inf or no frozen block was reached."""
        reached = any(name not in self._blocks for name in self._part)
        if reached and all(math.isfinite(float(own.sum())) for own in self._part.values()):
            self.parts.append({name: own.div_(scale) if scale != 1.0 else own for name, own in self._part.items()})
        self._part = {}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's samples, and the pieces kept for the next step."""
        return {
            "looks": [[list(row) for row in rows] for rows in self.probes],
            "intervals": self.intervals,
            "next_look": self.next_probe,
            "steps": self.steps,
            "turn": self.turn,
            "latest": [list(row) for row in self.latest],
            "complete": [[list(row) for row in rows] for rows in self.complete],
            "peaks": list(self.peaks),
            "kept": {name: tensor.clone() for name, tensor in self._kept.items()},
            "parts": [{name: tensor.clone() for name, tensor in part.items()} for part in self.parts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of the same cut. If it has only the peaks, keep the current, empty interval."""
        self.peaks = list(state["peaks"])
        if "steps" not in state:
            self.turn = 0
            return
        self.steps, self.turn = state["steps"], state["turn"]
        self.probes = [tuple(tuple(row) for row in rows) for rows in state["looks"]]
        self.intervals, self.next_probe = state["intervals"], state["next_look"]
        self.latest = [list(row) for row in state["latest"]]
        self.complete = [tuple(tuple(row) for row in rows) for rows in state["complete"]]
        self._kept = {name: tensor.clone() for name, tensor in state["kept"].items()}
        # Checkpoints of earlier versions have none.
        self.parts = [{name: tensor.clone() for name, tensor in part.items()} for part in state.get("parts", [])]

    @property
    def _completes(self) -> bool:
        """Whether the current step completes a sample: its own, or on a single rank that of the previous step."""
        return self.steps % self.every == (0 if self._across else 1)

    @property
    def _across(self) -> bool:
        return self.reducer.world.size > 1 and not self.reducer.compression.startswith("powersgd")

    def _multiply(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        own = self._kept[name]
        other, times = piece(gradient, self.turn, like=parameter)
        product, square = float(torch.dot(own, other)), float(torch.dot(other, other))
        if self._across and self.steps % self.every == 0:
            size, local = self.reducer.world.size, float(torch.dot(own, own))
            product = (size * product - local) / (size - 1)
        self._products[name] = (product * times, square * times)

    def _by_block(self, scale: float) -> list[float]:
        groups = {parameter: group for group in self.optimizer.param_groups for parameter in group["params"]}
        gains = [0.0] * len(self.prefix.chain.blocks)
        parameters = dict(self.reducer.carried)
        # The stored gradient of another step has been divided by its own scale.
        of_product = scale**2 if self._across else scale
        for name, (product, square) in self._products.items():
            product, square, parameter = product / of_product, square / scale**2, parameters[name]
            if (group := groups.get(parameter)) is not None:
                rate = rate_of(self.optimizer, group, elements=parameter.numel(), norm=math.sqrt(square))
                gains[self._blocks[name]] += rate * product
        return gains


def summed(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sum of each parameter's pieces in these parts."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.stack([part[name] for part in parts if name in part]).sum(0) for name in names}


def count_probe_batches(interval: int) -> int:
    """Return the number of batches of a probe, for intervals of so many steps."""
    return max(1, interval // BATCH_EVERY)


def count_probe_steps(interval: int) -> int:
    """Return the number of final steps of an interval that probe in their backward passes; 0 if it is too short."""
    return max(LEAST_PARTS, interval // STEP_EVERY) if interval >= LEAST_PARTS else 0


@dataclass(frozen=True)
class Estimate:
    """The mean of samples and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate from samples; its error is infinite if there are fewer than two."""
        count = len(values)
        mean = sum(values) / count if count else 0.0
        if count < 2:
            return cls(mean, math.inf)
        return cls(mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count))


def share_gained(gains: Gains, some: Sequence[int]) -> tuple[float, float]:
    """Return bounds on the share of `some` in the gain of all blocks: mean -+ two standard errors.

    (-infinity, infinity) if the gain of all blocks is not significantly above 0.
    """
    blocks = range(len(gains[0])) if gains else range(0)
    total = sum(max(0.0, sum(row[block] for row in gains) / len(gains)) for block in blocks)
    everything = Estimate.of([sum(row) for row in gains])
    theirs = Estimate.of([sum(row[block] for block in some) for row in gains])
    if not (math.isfinite(total) and math.isfinite(theirs.error) and everything.mean > 2 * everything.error):
        return -math.inf, math.inf
    return (theirs.mean - 2 * theirs.error) / total, (theirs.mean + 2 * theirs.error) / total
