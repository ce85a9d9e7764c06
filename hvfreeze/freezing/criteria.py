"""Freezing criteria: pure functions from statistics of a rank's blocks to the cut that it proposes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hvfreeze.freezing.coherence import Gains, share_gained


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The input of a criterion. Norms are None until two consecutive intervals are complete at the same cut."""

    cut: int
    num_blocks: int
    has_parameters: tuple[bool, ...]
    previous_norms: tuple[float, ...] | None
    norms: tuple[float, ...] | None
    epoch: float
    """Epochs trained so far, including the fraction of the current one."""
    num_epochs: float
    """Length of training in epochs; infinity if unknown."""
    warmup_epochs: float
    eta_max: float
    gains: Gains | None = None
    """This rank's estimated gain of each block in the sampled steps of the last two intervals at this cut."""
    probes: tuple[Gains, ...] = ()
    """Estimated gains of all blocks, including frozen ones, from two consecutive probes; empty without them."""
    peaks: tuple[float, ...] = ()
    """The largest mean gain of each block in any interval."""
    work: tuple[float, ...] = ()
    """Each block's share of the time of a step; empty if unknown, then all blocks count equally."""
    min_gain: float = 0.1
    limit: int | None = None
    """The deepest possible cut, if other code changes the blocks behind it; None: no limit."""

    @property
    def deepest(self) -> int:
        """The deepest cut that may be proposed."""
        return self.num_blocks - 1

    def active(self) -> range:
        """Return the blocks that still train and may be frozen."""
        return range(self.cut, self.num_blocks - 1)


@dataclass(frozen=True)
class Criterion:
    """A rule that proposes a cut."""

    propose: Callable[[Evidence], int]
    """Returns the cut that a rank proposes."""
    watches: Literal["", "norms", "gains"] = ""
    """The gradient statistics that it uses; they take two intervals and are collected only for such criteria. Without
    any, it follows a schedule, so its cuts can be predicted."""
    patience: int = 1
    """Minimum number of consecutive intervals in which it must propose a cut."""

    @property
    def watches_gradients(self) -> bool:
        """Whether it uses gradients."""
        return self.watches != ""


def rates_of_change(evidence: Evidence) -> tuple[float | None, ...]:
    """Return eta per block: |N(T-1) - N(T)| / N(T-1); None for frozen or parameterless blocks and the head."""
    if evidence.norms is None or evidence.previous_norms is None:
        return (None,) * evidence.num_blocks
    etas: list[float | None] = [None] * evidence.num_blocks
    for block in evidence.active():
        if evidence.has_parameters[block]:
            before, now = evidence.previous_norms[block], evidence.norms[block]
            etas[block] = abs(before - now) / max(before, 1e-12)
    return tuple(etas)


def past_parameterless(evidence: Evidence, cut: int) -> int:
    """Return `cut` extended over blocks without parameters: freezing them is free and saves their forward pass."""
    while cut < evidence.deepest and not evidence.has_parameters[cut]:
        cut += 1
    return cut


def gradient_norm(evidence: Evidence) -> int:
    """Freeze one more block if its eta is the smallest of all blocks that train, and at most `eta_max`.

    The rule of Singh et al. 2020, Algorithm 1; a tie freezes. The bound on eta is an addition: one block always has the
    smallest eta, so with few blocks left the original rule freezes by chance.
    """
    etas = rates_of_change(evidence)
    front = past_parameterless(evidence, evidence.cut)
    known = [eta for eta in etas if eta is not None]
    eta = etas[front] if front < evidence.num_blocks else None
    if eta is None or eta > min(known) or eta > evidence.eta_max:
        return evidence.cut
    return past_parameterless(evidence, front + 1)


def percentile(evidence: Evidence) -> int:
    """Freeze every block before the first whose eta reaches the median of all (AutoFreeze, Liu et al. 2021).

    With fewer than three blocks left the median is meaningless, and `gradient_norm` decides. `eta_max` bounds every
    frozen block.
    """
    etas = rates_of_change(evidence)
    known = [eta for eta in etas if eta is not None]
    if len(known) < 3:
        return gradient_norm(evidence)
    threshold = statistics.median(known)
    cut = evidence.cut
    for block in evidence.active():
        eta = etas[block]
        if eta is not None and (eta >= threshold or eta > evidence.eta_max):
            break
        cut = block + 1
    return cut


def linear(evidence: Evidence) -> int:
    """Freeze blocks in proportion to progress: int((t - s) / (1 - s) x (n - 1)).

    t is the completed fraction of training, s the fraction of the warm-up. Source: layer freezing in Composer.
    """
    start = min(evidence.warmup_epochs / evidence.num_epochs, 1.0)
    done = evidence.epoch / evidence.num_epochs
    progress = max(0.0, (done - start) / (1 - start)) if start < 1 else 0.0
    cut = int(progress * (evidence.num_blocks - 1))
    return max(evidence.cut, min(cut, evidence.deepest))


def geometric(evidence: Evidence) -> int:
    """Freeze a third of the remaining blocks in each epoch: F(e) = ceil(L (1 - (2/3)^e)).

    PipeTransformer's schedule (He et al. 2021), with L = n - 1 blocks that may be frozen, and e counted from the end of
    the warm-up.
    """
    epochs = math.floor(evidence.epoch - evidence.warmup_epochs + 1e-9)
    # Rounded first: in binary 3 (1 - 2/3) is a little more than 1 and would be rounded up to 2.
    cut = math.ceil(round(evidence.deepest * (1 - (1 - 1 / 3) ** max(0, epochs)), 9))
    return max(evidence.cut, min(cut, evidence.deepest))


THAW = 2.0
"""Hysteresis factor on `min_gain` for thawing, so that a block does not freeze and thaw in turn."""
LEARNED = 0.25
"""Share of its peak gain below which a block counts as trained. A block whose gain still rises is at its peak."""


def coherence(evidence: Evidence) -> int:
    """Freeze front blocks that are trained and whose share of the gain is below `min_gain` times that of the time.

    With gain s_b and work w_b of block b, front blocks F and all training blocks A: (sum_F s + 2 standard errors) /
    sum_A s < min_gain * sum_F w / sum_A w. With few samples the errors are large, and no block is frozen; nor is a
    block without samples, e.g. one that a script trains in other steps. See `Coherence`.
    """
    if (cut := thawed(evidence)) < evidence.cut:
        return cut
    if not evidence.gains:
        return evidence.cut
    work = evidence.work or (1.0,) * evidence.num_blocks
    trained, best = range(evidence.cut, evidence.num_blocks), evidence.cut
    for cut in range(evidence.cut + 1, evidence.deepest + 1):
        front = range(evidence.cut, cut)
        if not evidence.has_parameters[cut - 1]:
            best = cut if best == cut - 1 else best
            continue
        if not any(row[cut - 1] for row in evidence.gains):
            break
        _, most = share_gained(evidence.gains, front)
        now = sum(row[cut - 1] for row in evidence.gains) / len(evidence.gains)
        if now > LEARNED * evidence.peaks[cut - 1]:
            break
        if most < evidence.min_gain * sum(work[b] for b in front) / sum(work[b] for b in trained):
            best = cut
    return past_parameterless(evidence, best) if best > evidence.cut else evidence.cut


def thawed(evidence: Evidence) -> int:
    """Return the deeper of the two cuts to which two consecutive probes would thaw; without both, the current cut."""
    if len(evidence.probes) < 2:
        return evidence.cut
    return max(gains_from(evidence, probe) for probe in evidence.probes)


def gains_from(evidence: Evidence, probe: Gains) -> int:
    """Return the first frozen block whose gain exceeds `THAW` times the threshold for freezing, else the cut."""
    work, blocks = evidence.work or (1.0,) * evidence.num_blocks, range(evidence.num_blocks)
    for cut in range(evidence.cut):
        least, _ = share_gained(probe, (cut,))
        if least > THAW * evidence.min_gain * work[cut] / sum(work[b] for b in blocks):
            return cut
    return evidence.cut


def gain_shares(evidence: Evidence) -> tuple[float, ...]:
    """Return each block's share of the gain of a step; empty if gains are unknown.

    From two probes if there are any; else from training, with NaN for frozen blocks. NaN also for blocks without
    samples.
    """
    if evidence.gains is None and len(evidence.probes) < 2:
        return ()
    probed = [row for probe in evidence.probes for row in probe] if len(evidence.probes) == 2 else []
    rows, first = probed or evidence.gains or (), 0 if probed else evidence.cut
    means = [sum(row[block] for row in rows) / max(1, len(rows)) for block in range(evidence.num_blocks)]
    total = sum(max(0.0, mean) for mean in means)
    return tuple(math.nan if block < first or total <= 0 else mean / total for block, mean in enumerate(means))


CRITERIA: dict[str, Criterion] = {
    "coherence": Criterion(coherence, watches="gains", patience=2),
    "gradient-norm": Criterion(gradient_norm, watches="norms"),
    "percentile": Criterion(percentile, watches="norms"),
    "linear": Criterion(linear),
    "geometric": Criterion(geometric),
}


USABLE_INTERVALS = 2
"""Whole intervals at a cut that a rate of change needs."""


@dataclass
class Proposer:
    """The state of one criterion, deciding or shadow: its cut, and its proposals since that cut."""

    name: str
    cut: int = 0
    intervals: int = 0
    """Complete intervals at this cut; -1 until the interval after a change, which is dropped, is over."""
    recent: list[int] = field(default_factory=list)

    def state(self) -> list[Any]:
        """Return the constructor's arguments after the name."""
        return [self.cut, self.intervals, list(self.recent)]

    @property
    def criterion(self) -> Criterion:
        """The rule of this name."""
        return CRITERIA[self.name]

    def moved(self, cut: int) -> None:
        """Reset the state after a change of the cut."""
        self.cut, self.intervals, self.recent = cut, -1, []

    def propose(self, evidence: Evidence, patience: int) -> int:
        """Return the deepest cut supported in each of the last `patience` intervals; with fewer, the current cut."""
        usable = self.intervals >= USABLE_INTERVALS or not self.criterion.watches_gradients
        seen = evidence if usable else replace(evidence, previous_norms=None, norms=None, gains=None)
        needed = max(patience, self.criterion.patience)
        wanted = self.criterion.propose(replace(seen, cut=self.cut))
        wanted = wanted if evidence.limit is None else min(wanted, max(self.cut, evidence.limit))
        if wanted < self.cut:
            # Probes of frozen blocks are rare, so `patience` does not apply: the criterion waits for two that agree.
            return wanted
        self.recent = [*self.recent, wanted][-needed:]
        return min(self.recent) if len(self.recent) == needed else self.cut
