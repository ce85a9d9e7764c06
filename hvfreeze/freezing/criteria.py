"""Criteria: the cut that a rank proposes, from statistics of its blocks. Pure functions, no communication."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hvfreeze.freezing.coherence import Gains, share_gained

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
    num_epochs: float
    """That training lasts; infinity where that is not known."""
    warmup_epochs: float
    eta_max: float
    gains: Gains | None = None
    """What blocks gained in sampled steps of the last two intervals at this cut, as this rank estimates it."""
    looks: tuple[Gains, ...] = ()
    """What all blocks, the frozen ones too, would gain, by two looks in a row; none where there were no two."""
    peaks: tuple[float, ...] = ()
    """The most that each block gained in any interval, as its mean."""
    work: tuple[float, ...] = ()
    """Each block's part of a step's time; empty where nobody knows, all count the same then."""
    min_gain: float = 0.1
    limit: int | None = None
    """The deepest cut that blocks behind it allow, because something else changes them; None: any."""

    @property
    def deepest(self) -> int:
        """The deepest cut that may be proposed."""
        return self.num_blocks - 1

    def active(self) -> range:
        """Return the blocks that still train and could be frozen."""
        return range(self.cut, self.num_blocks - 1)


@dataclass(frozen=True)
class Criterion:
    """How a cut is proposed."""

    propose: Callable[[Evidence], int]
    """Returns the cut that a worker would like."""
    watches: Literal["", "norms", "gains"] = ""
    """What of the evidence it looks at, which is observed for it alone, and of which it needs two intervals. What a
    criterion that watches nothing will propose is certain beforehand, and planned with."""
    patience: int = 1
    """Intervals in a row, at least, in which it must want a cut."""

    @property
    def watches_gradients(self) -> bool:
        """Whether it looks at gradients."""
        return self.watches != ""


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


def gradient_norm(evidence: Evidence) -> int:
    """Freeze one more block when its eta is the smallest of all blocks still training, and not above `eta_max`.

    The study's test (Singh et al. 2020, Algorithm 1). A tie freezes. The bound on eta is ours: some block is always
    the smallest, so that with few blocks left the bare rule freezes by chance.
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

    With fewer than three blocks left a median says nothing; `gradient_norm` decides then. `eta_max` bounds each
    block that is frozen.
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
    """Freeze blocks in proportion to training done: int((t - s) / (1 - s) x (n - 1)) (Composer, C4).

    t is the fraction of training done, s the fraction that the warm-up takes.
    """
    start = min(evidence.warmup_epochs / evidence.num_epochs, 1.0)
    done = evidence.epoch / evidence.num_epochs
    progress = max(0.0, (done - start) / (1 - start)) if start < 1 else 0.0
    cut = int(progress * (evidence.num_blocks - 1))
    return max(evidence.cut, min(cut, evidence.deepest))


def geometric(evidence: Evidence) -> int:
    """Freeze a third of the blocks still training each epoch: F(e) = ceil(L (1 - (2/3)^e)).

    PipeTransformer's schedule (He et al. 2021), with L = n - 1 blocks that may be frozen and e counted from the end
    of the warm-up.
    """
    epochs = math.floor(evidence.epoch - evidence.warmup_epochs + 1e-9)
    # Rounded first: in binary 3 (1 - 2/3) is a little more than 1 and would be rounded up to 2.
    cut = math.ceil(round(evidence.deepest * (1 - (1 - GEOMETRIC_RATE) ** max(0, epochs)), 9))
    return max(evidence.cut, min(cut, evidence.deepest))


THAW = 2.0
"""Times what must be gained for a block to stay, so that a block does not freeze and thaw in turn."""
LEARNED = 0.25
"""Part of its best gain below which a block counts as one that has learned: before its gain has risen it has not."""


def coherence(evidence: Evidence) -> int:
    """Freeze the front blocks that have learned, and gain less than `min_gain` of what their part of the time would.

    With s_b the gain of block b, w_b its work, over the front blocks F and all blocks A that train:
    (sum_F s + 2 standard errors) / sum_A s < min_gain * sum_F w / sum_A w. Few samples leave large errors, and nothing
    is frozen; so does a block that no sample has seen, as one that a script trains in other steps. See `Coherence`.
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
    """Return the cut from which on blocks gain enough to train again, by each of two looks in a row."""
    if len(evidence.looks) < 2:
        return evidence.cut
    return max(gains_from(evidence, look) for look in evidence.looks)


def gains_from(evidence: Evidence, look: Gains) -> int:
    """Return the first of the frozen blocks that gains `THAW` times what keeps a block training, else the cut."""
    work, blocks = evidence.work or (1.0,) * evidence.num_blocks, range(evidence.num_blocks)
    for cut in range(evidence.cut):
        least, _ = share_gained(look, (cut,))
        if least > THAW * evidence.min_gain * work[cut] / sum(work[b] for b in blocks):
            return cut
    return evidence.cut


def gain_shares(evidence: Evidence) -> tuple[float, ...]:
    """Return each block's part of what a step gains; nothing before gains can be known.

    By two looks, where there were two; else in training, NaN where a block is frozen. NaN too where none was found.
    """
    if evidence.gains is None and len(evidence.looks) < 2:
        return ()
    looked = [row for look in evidence.looks for row in look] if len(evidence.looks) == 2 else []
    rows, first = looked or evidence.gains or (), 0 if looked else evidence.cut
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
"""Whole intervals at a cut that a rate of change takes."""


@dataclass
class Proposer:
    """How one criterion, deciding or in the shadow, has fared: its cut and what it has seen since that cut."""

    name: str
    cut: int = 0
    intervals: int = 0
    """Complete intervals at this cut; -1 until the one after a change, which is dropped, is over."""
    recent: list[int] = field(default_factory=list)

    def state(self) -> list[Any]:
        """Return the values that the constructor takes after the name."""
        return [self.cut, self.intervals, list(self.recent)]

    @property
    def criterion(self) -> Criterion:
        """The rule behind the name."""
        return CRITERIA[self.name]

    def moved(self, cut: int) -> None:
        """Forget what was seen at the old cut."""
        self.cut, self.intervals, self.recent = cut, -1, []

    def propose(self, evidence: Evidence, patience: int) -> int:
        """Return the cut that the criterion has wanted at least for `patience` intervals in a row."""
        usable = self.intervals >= USABLE_INTERVALS or not self.criterion.watches_gradients
        seen = evidence if usable else replace(evidence, previous_norms=None, norms=None, gains=None)
        needed = max(patience, self.criterion.patience)
        wanted = self.criterion.propose(replace(seen, cut=self.cut))
        wanted = wanted if evidence.limit is None else min(wanted, max(self.cut, evidence.limit))
        if wanted < self.cut:
            # Looks at frozen blocks are rare: the criterion itself waits for two that agree.
            return wanted
        self.recent = [*self.recent, wanted][-needed:]
        return min(self.recent) if len(self.recent) == needed else self.cut
