"""Sides that take turns, step by step, on the same ranks: what drifts on the machine drifts for all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol, TypeVar

import numpy as np

from analysis.benchmarks.judging import Row, is_narrow, judge, with_slack

T = TypeVar("T")

UNFUSED = "unfused"
"""Horovod as hvfreeze sets it up."""
FUSED = "fused"
"""Horovod as it is by default."""
ABSENT = "absent"
"""Horovod shut down, so that its thread takes nothing from others."""

AIM = 0.03
"""An interval this narrow, relative to the ratio, ends a contest."""
ROUND_SECONDS = 0.5
MOST_STEPS = 100
STEPS_AFTER_SWITCH = 3
WARM_STEPS = 2
COMPARED_STEPS = 2
TOLERANCE = 2e-3

Seconds = dict[str, list[float]]


class Meeting(Protocol):
    """The ranks of a contest. Every method is a collective."""

    def use(self, mode: str) -> None:
        """Set Horovod up in this way on all ranks."""

    def barrier(self) -> None:
        """Return when every rank has called."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values, in rank order."""

    def agree(self, value: float) -> float:
        """Return rank 0's value."""


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Side:
    """One way of doing the work.

    Attributes:
        name: unique in its contest.
        step: does it once; returns a number, such as the loss, which is equal for equivalent sides.
        mode: how Horovod is set up meanwhile.
        prepare: called before every step, untimed.
    """

    name: str
    step: Callable[[], float]
    mode: str = UNFUSED
    prepare: Callable[[], None] = nothing


def quotient(ours: float, reference: float) -> float:
    """Return ours over reference."""
    return ours / reference


@dataclass(frozen=True, kw_only=True)
class Duel:
    """Two sides of a contest and what is asked of their times.

    Attributes:
        name: of the row.
        ours: name of a side.
        reference: name of another, or of several, of which the fastest counts.
        bound: for the median ratio.
        what: in words.
        slack_seconds: more than the reference that are allowed too.
        ratio: of the seconds of a pair.
        alike: whether both sides compute the same numbers, which is then checked.
        describe: more words, from each side's median seconds.
    """

    name: str
    ours: str
    reference: str | tuple[str, ...]
    bound: float
    what: str
    slack_seconds: float = 0.0
    ratio: Callable[[float, float], float] = quotient
    alike: bool = True
    describe: Callable[[dict[str, float]], str] = lambda medians: ""

    @property
    def references(self) -> tuple[str, ...]:
        """The sides that may be the reference."""
        return (self.reference,) if isinstance(self.reference, str) else self.reference


class OutOfTimeError(Exception):
    """A contest would begin when the time for all is over. Raised on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long to measure.

    Attributes:
        cap_seconds: for one duel.
        quick: measure next to nothing: only to see that everything runs.
        min_pairs: of every duel.
        until: the time, on the clock of contests, after which none begins.
    """

    cap_seconds: float
    quick: bool = False
    min_pairs: int = 8
    until: float = math.inf

    def rows(self, batch_rows: int) -> int:
        """Return the size of a batch."""
        return min(batch_rows, 16) if self.quick else batch_rows

    def at_least(self, pairs: int) -> Pace:
        """Return the pace with another least number of pairs, for steps that take long."""
        return self if self.quick else replace(self, min_pairs=pairs)


def hold(
    meeting: Meeting,
    sides: Sequence[Side],
    duels: Sequence[Duel],
    *,
    pace: Pace,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Return a row for each duel, once every interval is narrow or the time is over.

    Collective: every rank of `meeting` must call this.

    Raises:
        OutOfTimeError: the time for all contests is over.
        ValueError: two sides that should compute the same do not.
    """
    contest = Contest(meeting, sides, clock)
    start = clock()
    if meeting.agree(float(start > pace.until)):
        raise OutOfTimeError
    steps = contest.warm_up()
    for number in count():
        contest.play(number, steps=steps)
        seconds = contest.slowest()
        rows = [verdict(duel, seconds) for duel in duels]
        if number == 0:
            for duel in duels:
                compare_values(duel, contest.values)
        pairs = min(row.n for row in rows)
        settled = pairs >= pace.min_pairs and all(is_narrow(row, width=AIM) for row in rows)
        over = pairs >= min(2, pace.min_pairs) and clock() - start > pace.cap_seconds * len(duels)
        if meeting.agree(float(settled or over)):
            break
    return [row if is_narrow(row) else replace(row, what=row.what + "; the time cap ended it") for row in rows]


class Contest:
    """The steps of all sides, in turns, and their seconds on this rank."""

    def __init__(self, meeting: Meeting, sides: Sequence[Side], clock: Callable[[], float]) -> None:
        self.meeting, self.sides, self.clock = meeting, sides, clock
        self.modes = list(dict.fromkeys(side.mode for side in sides))
        self.values: dict[str, list[float]] = {side.name: [] for side in sides}
        self._mine: Seconds = {side.name: [] for side in sides}
        self._all: Seconds = {side.name: [] for side in sides}

    def warm_up(self) -> int:
        """Make untimed steps; return how many timed ones of each side make a round."""
        if len(self.modes) > 1:
            return STEPS_AFTER_SWITCH
        self.meeting.use(self.modes[0])
        taken = 0.0
        for _ in range(WARM_STEPS):
            # A step as long as a round is a whole run, which warms up by itself.
            if taken < ROUND_SECONDS * len(self.sides):
                taken = self.meeting.agree(sum(self._step(side) for side in self.sides))
        return max(1, min(MOST_STEPS, int(ROUND_SECONDS / max(taken, 1e-6))))

    def play(self, number: int, *, steps: int) -> None:
        """Make `steps` timed steps with every side, in turns that change from round to round."""
        for mode in rotated(self.modes, number):
            present = [side for side in self.sides if side.mode == mode]
            if len(self.modes) > 1:
                # Horovod has forgotten every tensor: the first steps tell it anew.
                self.meeting.use(mode)
                for side in present:
                    self._step(side)
            for turn in range(steps):
                for side in rotated(present, number + turn):
                    self._mine[side.name].append(self._step(side))

    def slowest(self) -> Seconds:
        """Return the seconds of all timed steps, each on its slowest rank."""
        for side in self.sides:
            done = len(self._all[side.name])
            everyone = self.meeting.gather(self._mine[side.name][done:])
            self._all[side.name] += [max(step) for step in zip(*everyone, strict=True)]
        return self._all

    def _step(self, side: Side) -> float:
        side.prepare()
        self.meeting.barrier()
        start = self.clock()
        value = side.step()
        seconds = self.clock() - start
        if len(self.values[side.name]) < COMPARED_STEPS:
            self.values[side.name].append(value)
        return seconds


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return `items` with another one first in every turn."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def verdict(duel: Duel, seconds: Seconds) -> Row:
    """Return the row of `duel` for the seconds so far."""
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    best = min(duel.references, key=lambda name: medians[name])
    ratios = [duel.ratio(a, b) for a, b in zip(seconds[duel.ours], seconds[best], strict=True)]
    bound = with_slack(duel.bound, slack_seconds=duel.slack_seconds, reference_seconds=medians[best])
    times = f"{1e3 * medians[duel.ours]:.2f} ms against {1e3 * medians[best]:.2f} ms"
    more = duel.describe(medians)
    return judge(duel.name, ratios, bound=bound, what=f"{duel.what}; {times}" + (f"; {more}" if more else ""))


def compare_values(duel: Duel, values: dict[str, list[float]]) -> None:
    """Raise ValueError when the sides of a duel that should compute the same give different numbers."""
    ours = values[duel.ours]
    for name in duel.references if duel.alike else ():
        if not np.allclose(ours, values[name], rtol=TOLERANCE, atol=TOLERANCE):
            raise ValueError(f"{duel.name}: ours gives {ours}, {name} {values[name]}: they do not compute the same")
