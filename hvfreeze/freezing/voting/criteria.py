"""Criteria: from per-block statistics to the cut that a worker proposes. Pure functions, no communication.

Blocks are numbered 0..n-1 in forward order; a cut k freezes blocks 0..k-1; the last block, the head, is never frozen,
so the deepest cut is n-1. `norms[l]` is the norm of block l's gradient, summed as a vector over one interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

EPSILON = 1e-12
GEOMETRIC_RATE = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a criterion may look at. Norms are None until two intervals in a row are complete at the same cut."""

    cut: int
    num_blocks: int
    has_parameters: tuple[bool, ...]
    previous_norms: tuple[float, ...] | None
    norms: tuple[float, ...] | None
    epoch: float
    """Epochs trained so far, with the fraction of the current one."""
    num_epochs: int
    warmup_epochs: float
    eta_max: float

    @property
    def deepest(self) -> int:
        """The deepest cut that may be proposed."""
        return self.num_blocks - 1

    def active(self) -> range:
        """Return the blocks that still train and could be frozen."""
        return range(self.cut, self.num_blocks - 1)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The cut that a worker would like, with the rates of change that led to it (None where there are none)."""

    cut: int
    etas: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Criterion:
    """How a cut is proposed."""

    propose: Callable[[Evidence], Proposal]
    watches_gradients: bool = False
    """Whether it looks at `norms`: sums of gradients are then kept, and it waits until there are two intervals of them.
    What a criterion without it will propose is certain beforehand, and planned with."""


def rates_of_change(evidence: Evidence) -> tuple[float | None, ...]:
    """Return eta per block: |N(T-1) - N(T)| / N(T-1); None where frozen, parameterless, or the head."""
    if evidence.norms is None or evidence.previous_norms is None:
        return (None,) * evidence.num_blocks
    etas: list[float | None] = [None] * evidence.num_blocks
    for block in evidence.active():
        if evidence.has_parameters[block]:
            before, now = evidence.previous_norms[block], evidence.norms[block]
            etas[block] = abs(before - now) / max(before, EPSILON)
    return tuple(etas)


def past_parameterless(evidence: Evidence, cut: int) -> int:
    """Return `cut` moved past blocks without parameters: freezing them costs nothing and saves their forward pass."""
    while cut < evidence.deepest and not evidence.has_parameters[cut]:
        cut += 1
    return cut


def first_trained(evidence: Evidence) -> int:
    """Return the first block from the cut on that has parameters, the head where there is none before it."""
    return past_parameterless(evidence, evidence.cut)


def gradient_norm(evidence: Evidence) -> Proposal:
    """Freeze one more block when its eta is the smallest of all blocks still training, and not above `eta_max`.

    The study's test (Singh et al. 2020, Algorithm 1). A tie freezes. The bound on eta is ours: some block is always
    the smallest, so that with few blocks left the bare rule freezes by chance.
    """
    etas = rates_of_change(evidence)
    front = first_trained(evidence)
    known = [eta for eta in etas if eta is not None]
    eta = etas[front] if front < evidence.num_blocks else None
    if eta is None or eta > min(known) or eta > evidence.eta_max:
        return Proposal(cut=evidence.cut, etas=etas)
    return Proposal(cut=past_parameterless(evidence, front + 1), etas=etas)


def percentile(evidence: Evidence, *, q: float = 50) -> Proposal:
    """Freeze every block before the first whose eta reaches the `q`-th percentile of all (AutoFreeze, Liu et al. 2021).

    With fewer than three blocks left a median says nothing; `gradient_norm` decides then. `eta_max` bounds each
    block that is frozen.
    """
    etas = rates_of_change(evidence)
    known = sorted(eta for eta in etas if eta is not None)
    if len(known) < 3:
        return gradient_norm(evidence)
    threshold = interpolated(known, q)
    cut = evidence.cut
    for block in evidence.active():
        eta = etas[block]
        if eta is not None and (eta >= threshold or eta > evidence.eta_max):
            break
        cut = block + 1
    return Proposal(cut=cut, etas=etas)


def interpolated(ordered: Sequence[float], q: float) -> float:
    """Return the `q`-th percentile of ordered numbers, interpolated linearly."""
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def linear(evidence: Evidence, *, level: float = 1.0) -> Proposal:
    """Freeze blocks in proportion to training done: int(level x (t - s) / (1 - s) x (n - 1)) (Composer, C4).

    t is the fraction of training done, s the fraction that the warm-up takes.
    """
    start = min(evidence.warmup_epochs / evidence.num_epochs, 1.0)
    done = evidence.epoch / evidence.num_epochs
    progress = max(0.0, (done - start) / (1 - start)) if start < 1 else 0.0
    cut = int(level * progress * (evidence.num_blocks - 1))
    return Proposal(cut=max(evidence.cut, min(cut, evidence.deepest)))


def geometric(evidence: Evidence, *, rate: float = GEOMETRIC_RATE) -> Proposal:
    """Freeze the share `rate` of the blocks still training each epoch: F(e) = ceil(L (1 - (1 - rate)^e)).

    PipeTransformer's schedule (He et al. 2021), with L = n - 1 blocks that may be frozen and e counted from the end
    of the warm-up.
    """
    epochs = math.floor(evidence.epoch - evidence.warmup_epochs + 1e-9)
    # Rounded first: in binary 3 (1 - 2/3) is a little more than 1 and would be rounded up to 2.
    cut = math.ceil(round(evidence.deepest * (1 - (1 - rate) ** max(0, epochs)), 9))
    return Proposal(cut=max(evidence.cut, min(cut, evidence.deepest)))


CRITERIA: dict[str, Criterion] = {
    "gradient-norm": Criterion(gradient_norm, watches_gradients=True),
    "percentile": Criterion(percentile, watches_gradients=True),
    "linear": Criterion(linear),
    "geometric": Criterion(geometric),
}
