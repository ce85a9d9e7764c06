"""What each block still gains: do gradients of different samples agree?

For gradients g, h of different samples, <g, h> is an unbiased estimate of |E g|^2: what a step gains, to first order
and for each unit of the learning rate, on samples that it has not seen. The rest of |g|^2 is noise. Sources: gradient
signal to noise (Liu et al., "Understanding Why Neural Networks Generalize Well Through GSNR of Parameters", ICLR 2020);
coherent gradients (Chatterjee, ICLR 2020).

Ranks compute gradients of different samples, so rank r has its own estimate from its gradient and the average of all
n ranks, without a message: (n <g_r, avg> - |g_r|^2) / (n - 1). One rank alone, and ranks whose average is compressed to
a low rank, take the products of their own gradients of two steps in a row.
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
"""Elements of a parameter, at most, that are looked at in one step: another piece in every sampled step, so that the
estimate has no bias and costs less than a hundredth of the step."""
SAMPLES_PER_INTERVAL = 16
LOOK_EVERY = 16
"""Steps of an interval for each batch of a look at frozen blocks."""
LEAST_PARTS = 4
"""Into which the samples of a look are divided; a look by fewer gradients says nothing."""
LOOKED_AT = 64
"""Steps of an interval for each whose own backward pass reaches frozen blocks, where `look` is not called."""
LONGEST_GAP = 16
"""Steps between two samples, at most; at least two."""
WINDOW = 32
"""Sampled steps that are judged together, at least, where two intervals have fewer."""
Gains = tuple[tuple[float, ...], ...]
"""One row a sampled step, one number a block; 0 for blocks that nobody trains."""


def gap(interval: int) -> int:
    """Return the steps between two sampled ones, for intervals of so many steps."""
    return min(max(2, interval // SAMPLES_PER_INTERVAL), LONGEST_GAP)


def piece(tensor: Tensor, turn: int, *, like: Tensor) -> tuple[Tensor, float]:
    """Return at most `PIECE` elements of `tensor`, in the memory order of `like`, and how many times more it has."""
    flat = tensor.reshape(-1) if like.is_contiguous() or tensor.dim() != 4 else tensor.permute(0, 2, 3, 1).reshape(-1)
    pieces = max(1, len(flat) // PIECE)
    first = turn % pieces * PIECE
    part = flat[first : first + PIECE] if pieces > 1 else flat
    return part, len(flat) / max(1, len(part))


def rate_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], *, elements: int, norm: float) -> float:
    """Return by what the optimizer multiplies a gradient of so many elements and this norm, roughly.

    SGD by the learning rate. Others divide by the size that gradients have had (Adam and its kin): about the rate
    per element, whatever the norm. Constant factors, as of momentum, do not count: only blocks are compared.
    """
    lr = float(group["lr"])
    return lr if isinstance(optimizer, torch.optim.SGD) else lr * math.sqrt(elements) / max(norm, 1e-30)


@dataclass
class Coherence:
    """Samples what the blocks that train gain in a step; see the module.

    Attributes:
        latest: of the interval under way, a row for each sample, on all ranks of the same steps; NaN where it is of no
            use.
        complete: of the last complete intervals at this cut: two, or as many as have `WINDOW` samples.
        peaks: the most that each block gained in any interval so far, as its mean.
        looks: what all blocks, the frozen ones too, would gain, by two looks in intervals that follow each other; empty
            but around these.
    """

    prefix: FrozenPrefix
    optimizer: torch.optim.Optimizer
    reducer: Reducer
    every: int
    """Steps between two samples."""
    join: Join = list
    """Adds up with the ranks that hold the other blocks; a collective among them."""
    latest: list[list[float]] = field(default_factory=list)
    complete: list[Gains] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    looks: list[Gains] = field(default_factory=list)
    intervals: int = 0
    """At this cut."""
    next_look: int = 2
    """The interval at whose end frozen blocks are looked at; the two after that come twice as late."""
    steps: int = 0
    """Of the interval under way."""
    turn: int = 0
    """Counts samples, for the piece that the next looks at."""
    looking: bool = False
    """Whether the backward pass of the step under way reaches frozen blocks."""
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    """Pieces of this rank's own gradients in such steps of the interval, by the parameter's name."""
    _blocks: dict[str, int] = field(default_factory=dict)
    """Of each parameter that trains, by its name."""
    _kept: dict[str, Tensor] = field(default_factory=dict)
    """Pieces of this rank's own gradients."""
    _products: dict[str, tuple[float, float]] = field(default_factory=dict)
    """<g, h> and |h|^2 of the sample under way, of whole parameters."""
    _part: dict[str, Tensor] = field(default_factory=dict)
    """Of the step under way."""
    _part_of: int = -1
    """The step of the reducer that it belongs to: a step that is skipped is followed by another."""
    _taken: Counter[str] = field(default_factory=Counter)
    """Backward passes of that step that have reached a frozen parameter."""

    @property
    def gains(self) -> Gains | None:
        """What the complete intervals found, from the oldest on; None until there are two."""
        return tuple(row for rows in self.complete for row in rows) if len(self.complete) > 1 else None

    def follow(self) -> None:
        """Begin anew at another cut; what blocks gained at best stays."""
        chain, (start, stop) = self.prefix.chain, self.prefix.held
        blocks = range(max(self.prefix.cut, start), stop)
        self._blocks = {name: block for block in blocks for name, _ in self.prefix.trained(block, block + 1)}
        if len(self.peaks) != len(chain.blocks):
            self.peaks = [0.0] * len(chain.blocks)
        self.complete, self.looks, self.intervals, self.next_look = [], [], 0, 2
        self.restart()

    def restart(self) -> None:
        """Begin an empty interval."""
        self.steps, self.latest = 0, []
        self.looks = self.looks if len(self.looks) < 2 else []
        self._kept, self._products = {}, {}
        self.looking, self.parts = False, []

    def observe(self, slot: int, gradient: Tensor) -> None:
        """Look at this rank's own gradient of the `slot`-th carried parameter, before it is averaged."""
        name, parameter = self.reducer.carried[slot]
        if self.looking and name in self._blocks:
            self._look_at(name, parameter, gradient)
        if self.steps % self.every == 0:
            # Anew where a step was skipped, as one whose gradients are infinite.
            if name in self._blocks:
                self._kept[name] = piece(gradient, self.turn, like=parameter)[0].clone()
        elif name in self._kept:
            self._multiply(name, parameter, gradient)

    def take(self, name: str, gradient: Tensor) -> bool:
        """Look at the gradient of a frozen parameter in one backward pass; tell whether it was the step's last."""
        whole = gradient.to_dense() if gradient.is_sparse else gradient
        self._look_at(name, self.prefix.chain.model.get_parameter(name), whole)
        self._taken[name] += 1
        return self._taken[name] >= self.reducer.passes

    def compare(self) -> None:
        """Look at the averages, which the parameters' gradients are now, where ranks are compared."""
        if self._across and self.steps % self.every == 0:
            for name, parameter in self.reducer.carried:
                if name in self._kept and parameter.grad is not None:
                    self._multiply(name, parameter, self.reducer.average_of(parameter.grad))

    def end_step(self, *, scale: float = 1.0) -> None:
        """Count a step; a sample that is complete is kept, unless it is not finite.

        `scale` is by what the gradients of this step that were looked at are too large.
        """
        if self.looking:
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
        """Keep what the interval has found. Collective where blocks are held by several ranks."""
        self.intervals += 1
        each, flat = 1 + len(self.prefix.chain.blocks), [1.0]
        for row in self.latest:
            flat += [1.0, *row] if all(map(math.isfinite, row)) else [0.0] * each
        ranks, *flat = self.join(flat)
        # Those that are of use on all ranks.
        starts = [first for first in range(0, len(flat), each) if flat[first] == ranks]
        rows = tuple(tuple(flat[first + 1 : first + each]) for first in starts)
        self.complete.append(rows)
        while len(self.complete) > 2 and sum(map(len, self.complete[1:])) >= WINDOW:
            self.complete.pop(0)
        if rows:
            means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
            self.peaks = [max(peak, mean) for peak, mean in zip(self.peaks, means, strict=True)]

    @property
    def looks_are_due(self) -> bool:
        """Whether frozen blocks are to be looked at before the interval under way ends."""
        return self.prefix.cut > 0 and self.intervals + 1 >= self.next_look

    def look(self, losses: Iterable[Tensor]) -> None:
        """Compare the gradients of `losses`, of different samples, for all blocks; nothing changes.

        The losses are computed one by one, with the frozen parameters' gradients.
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
        self._add_look(self._gains_of(parts, summed(parts), count=len(parts)) if enough else ())
        self.turn += 1

    def end_look(self) -> None:
        """Compare the gradients of the interval's steps that have reached frozen blocks; before `end_interval`.

        With the mean of all other ranks', whose samples are others; one rank alone compares its own. Collective.
        """
        parts = self.parts
        whole, count = summed(parts), len(parts)
        mine = whole if self.reducer.world.size > 1 else None
        if mine is not None:
            whole, count = self._over_ranks(whole, count)
        enough = len(parts) >= LEAST_PARTS and (mine is None or count - len(parts) >= LEAST_PARTS)
        self._add_look(self._gains_of(parts, whole, count=count, mine=mine) if enough else ())

    def _over_ranks(self, mine: dict[str, Tensor], count: int) -> tuple[dict[str, Tensor], int]:
        """Return the sums of all ranks' pieces, and of their numbers of gradients. Collective."""
        named = self.prefix.trained(0, len(self.prefix.chain.blocks))
        empty = {name: torch.zeros_like(piece(p.detach(), self.intervals, like=p)[0]) for name, p in named}
        pieces = [mine.get(name, empty[name]).float() for name, _ in named]
        sent = torch.cat([torch.tensor([float(count)]), *pieces])
        self.reducer.other_bytes += sent.nbytes
        sums = self.reducer.world.allreduce_sum(sent, name=f"{self.reducer.title}look")
        counts, *wholes = sums.split([1, *map(len, pieces)])
        return {name: of.to(empty[name].dtype) for (name, _), of in zip(named, wholes, strict=True)}, int(counts)

    def _add_look(self, rows: Gains) -> None:
        self.looks.append(rows)
        interval = self.intervals + 1
        self.next_look = interval + 1 if len(self.looks) == 1 else 2 * interval

    def _gains_of(
        self,
        parts: Sequence[dict[str, Tensor]],
        whole: dict[str, Tensor],
        *,
        count: int,
        mine: dict[str, Tensor] | None = None,
    ) -> Gains:
        """Return a row for each part, the products of its gradients with the mean of others.

        Args:
            parts: this rank's gradients.
            whole: the sum of these, and of those of other ranks where there are some.
            count: how many it is the sum of.
            mine: the sum of this rank's, to compare with others' alone; None compares with all but the part itself.
        """
        chain = self.prefix.chain
        named = [(b, *of) for b in range(len(chain.blocks)) for of in self.prefix.trained(b, b + 1)]
        group_of = {
            p: g for g, group in zip(self.optimizer.param_groups, self.prefix.groups, strict=True) for p in group
        }
        rows, others = [[0.0] * len(chain.blocks) for _ in parts], count - (1 if mine is None else len(parts))
        for block, name, p in named:
            # A parameter that took no part in a loss has no gradient in it.
            found = [(row, part[name]) for row, part in zip(rows, parts, strict=True) if name in part]
            if not found:
                continue
            total = whole[name]
            times = p.numel() / max(1, total.numel())
            norm = math.sqrt(times) * float(torch.linalg.vector_norm(total)) / count
            rate = rate_of(self.optimizer, group_of[p], elements=p.numel(), norm=norm)
            for row, own in found:
                other = total - (own if mine is None else mine[name])
                row[block] += rate * times * float(torch.dot(own, other)) / others
        return tuple(map(tuple, rows))

    def _look_at(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        """Add a piece of a gradient, the same in all steps of an interval, to what this step's passes had of it."""
        if self._part_of != self.reducer.steps:
            self._part, self._taken, self._part_of = {}, Counter(), self.reducer.steps
        own = piece(gradient.detach(), self.intervals, like=parameter)[0]
        self._part[name] = self._part[name] + own if name in self._part else own.clone()

    def _keep_part(self, scale: float) -> None:
        """Keep what this step's gradients were, unless they are not finite, or no frozen block was reached."""
        reached = any(name not in self._blocks for name in self._part)
        if reached and all(math.isfinite(float(own.sum())) for own in self._part.values()):
            self.parts.append({name: own.div_(scale) if scale != 1.0 else own for name, own in self._part.items()})
        self._part = {}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's samples, and the pieces that wait for the next step."""
        return {
            "looks": [[list(row) for row in rows] for rows in self.looks],
            "intervals": self.intervals,
            "next_look": self.next_look,
            "steps": self.steps,
            "turn": self.turn,
            "latest": [list(row) for row in self.latest],
            "complete": [[list(row) for row in rows] for rows in self.complete],
            "peaks": list(self.peaks),
            "kept": {name: tensor.clone() for name, tensor in self._kept.items()},
            "parts": [{name: tensor.clone() for name, tensor in part.items()} for part in self.parts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned at the same cut."""
        self.steps, self.turn = state["steps"], state["turn"]
        self.looks = [tuple(tuple(row) for row in rows) for rows in state["looks"]]
        self.intervals, self.next_look = state["intervals"], state["next_look"]
        self.latest = [list(row) for row in state["latest"]]
        self.complete = [tuple(tuple(row) for row in rows) for rows in state["complete"]]
        self.peaks = list(state["peaks"])
        self._kept = {name: tensor.clone() for name, tensor in state["kept"].items()}
        # Checkpoints of earlier versions have none.
        self.parts = [{name: tensor.clone() for name, tensor in part.items()} for part in state.get("parts", [])]

    @property
    def _completes(self) -> bool:
        """Whether the step under way completes a sample: its own, or alone the one that the step before it began."""
        return self.steps % self.every == (0 if self._across else 1)

    @property
    def _across(self) -> bool:
        return self.reducer.world.size > 1 and not self.reducer.compression.startswith("powersgd")

    def _multiply(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        own = self._kept[name]
        other, times = piece(gradient, self.turn, like=parameter)
        product, square = float(torch.dot(own, other)), float(torch.dot(other, other))
        if self._across and self.steps % self.every == 0:
            size, mine = self.reducer.world.size, float(torch.dot(own, own))
            product = (size * product - mine) / (size - 1)
        self._products[name] = (product * times, square * times)

    def _by_block(self, scale: float) -> list[float]:
        groups = {parameter: group for group in self.optimizer.param_groups for parameter in group["params"]}
        gains = [0.0] * len(self.prefix.chain.blocks)
        parameters = dict(self.reducer.carried)
        # What waits for the gradient of another step has been divided by the scale of its own.
        of_product = scale**2 if self._across else scale
        for name, (product, square) in self._products.items():
            product, square, parameter = product / of_product, square / scale**2, parameters[name]
            if (group := groups.get(parameter)) is not None:
                rate = rate_of(self.optimizer, group, elements=parameter.numel(), norm=math.sqrt(square))
                gains[self._blocks[name]] += rate * product
        return gains


def nothing_sampled() -> dict[str, Any]:
    """Return the state of a `Coherence` at the begin of the first interval at a cut, but for its peaks."""
    looked = {"looks": [], "intervals": 0, "next_look": 2, "parts": []}
    return {"steps": 0, "turn": 0, "latest": [], "complete": [], "kept": {}, **looked}


def summed(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sum of each parameter's pieces in these parts."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.stack([part[name] for part in parts if name in part]).sum(0) for name in names}


def batches_of_a_look(interval: int) -> int:
    """Return how many batches a look takes, for intervals of so many steps."""
    return max(1, interval // LOOK_EVERY)


def steps_of_a_look(interval: int) -> int:
    """Return how many steps' own backward passes make a look, the last of an interval of so many; 0: too few there."""
    return max(LEAST_PARTS, interval // LOOKED_AT) if interval >= LEAST_PARTS else 0


@dataclass(frozen=True)
class Estimate:
    """The mean of what samples have found, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate from samples; infinitely uncertain where there are fewer than two."""
        count = len(values)
        mean = sum(values) / count if count else 0.0
        if count < 2:
            return cls(mean, math.inf)
        return cls(mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count))


def share_gained(gains: Gains, some: Sequence[int]) -> tuple[float, float]:
    """Return between which parts of the gain of all blocks that of `some` lies: mean -+ two standard errors.

    (-infinity, infinity) where that of all is not known to be more than nothing.
    """
    blocks = range(len(gains[0])) if gains else range(0)
    total = sum(max(0.0, sum(row[block] for row in gains) / len(gains)) for block in blocks)
    everything = Estimate.of([sum(row) for row in gains])
    theirs = Estimate.of([sum(row[block] for block in some) for row in gains])
    if not (math.isfinite(total) and math.isfinite(theirs.error) and everything.mean > 2 * everything.error):
        return -math.inf, math.inf
    return (theirs.mean - 2 * theirs.error) / total, (theirs.mean + 2 * theirs.error) / total
