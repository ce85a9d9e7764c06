"""Chooses the gradient compression by trying each in a few steps; `auto` keeps the least lossy of the fastest.

The steps of a trial are steps of the training. A choice depends on clocks, so it is recorded in the run and in the
checkpoint.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvfreeze.comm.gradient_exchange import Named
from hvfreeze.comm.low_rank import LowRankBucket, fits
from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.world import World
from hvfreeze.config.optimizer import parse_compression
from hvfreeze.runs.clock import BESIDE_TRAINING, PhaseClock

CANDIDATES = ("none", "fp16", "powersgd:32", "powersgd:16")
"""Compressions that `auto` tries, in the order of their error: each keeps less of a gradient than the one before.

Rank 4 lost a point of accuracy in 156 steps (analysis/results/compression), so lower ranks need an explicit
--compression."""
TRIED_STEPS = 4
"""Steps per compression and round; the first, which allocates buffers, is not counted."""
ROUNDS = 3
"""Rounds: a disturbance of a few steps affects one compression in one round, and the median of three ignores it."""
FAR = 2.0
"""After each round, compressions whose steps take more than this many times the fewest seconds leave the trial, so
that a slow network does not make every round long."""
CLOSE = 1.05
"""Steps of up to this many times the fewest seconds count as equally fast: their communication is hidden."""
EXPOSED_SHARE = 0.1
"""Share of a step that waiting for the exchange may take before a larger --accumulate is recommended."""


class Trial:
    """Tries compressions in rounds, and keeps the least lossy of the fastest.

    Every other round is in reverse order, so that a steadily changing speed favours none.

    `names` are in order of loss; `rounds` have (seconds of a step, seconds of waiting in it) by name.
    """

    def __init__(self, names: Sequence[str], rounds: Sequence[Mapping[str, Sequence[float]]] = ()) -> None:
        self.names = tuple(names)
        self._rounds = [{name: (step, waiting) for name, (step, waiting) in each.items()} for each in rounds]

    @property
    def over(self) -> bool:
        """Whether the trial is over, so that `now` is final."""
        return self._complete == ROUNDS or (self._complete > 0 and len(self._names_of(self._complete)) == 1)

    @property
    def now(self) -> str:
        """The compression of the next steps."""
        if self.over:
            seconds = {name: step for name, (step, _) in self.medians().items()}
            return next(name for name in self.names if seconds[name] <= CLOSE * min(seconds.values()))
        number = self._complete
        order = self._names_of(number)
        tried = self._rounds[number] if number < len(self._rounds) else {}
        return next(name for name in (order[::-1] if number % 2 else order) if name not in tried)

    def medians(self) -> dict[str, tuple[float, float]]:
        """Return the seconds of a step, and of waiting in it, with each tried compression: medians over rounds."""
        return medians_of(self._rounds)

    def add(self, step: float, waiting: float) -> None:
        """Record the seconds of the steps with `now`."""
        assert not self.over, "the trial is over"
        name, number = self.now, self._complete
        if number == len(self._rounds):
            self._rounds.append({})
        self._rounds[number][name] = step, waiting

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trial, as arguments of `Trial`."""
        return {"names": list(self.names), "rounds": [dict(each) for each in self._rounds]}

    @property
    def _complete(self) -> int:
        """Number of complete rounds."""
        return sum(set(each) == set(self._names_of(number)) for number, each in enumerate(self._rounds))

    def _names_of(self, number: int) -> tuple[str, ...]:
        """Return the compressions of a round; compressions that were far slower before have left."""
        steps = {name: step for name, (step, _) in medians_of(self._rounds[:number]).items()}
        return tuple(name for name in self.names if not steps or steps[name] <= FAR * min(steps.values()))


def medians_of(rounds: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Return the medians over rounds of (seconds of a step, seconds of waiting) by name."""
    names = dict.fromkeys(name for each in rounds for name in each)
    found = {name: [each[name] for each in rounds if name in each] for name in names}
    return {
        name: (statistics.median(s for s, _ in two), statistics.median(w for _, w in two))
        for name, two in found.items()
    }


MOST_STEPS = 1000
"""Number of steps whose median is reported."""


class CompressionChoice:
    """Measures steps, and with `auto` sets the reducer's compression.

    `asked` is --compression, `accumulate` the number of batches per step; `say` logs a line for the user.
    """

    def __init__(
        self,
        reducer: Reducer,
        clock: PhaseClock,
        world: World,
        *,
        asked: str,
        accumulate: int,
        say: Callable[[str], None],
    ) -> None:
        self._reducer, self._clock, self._world = reducer, clock, world
        self._asked, self._accumulate, self._say = asked, accumulate, say
        self._candidates: tuple[str, ...] = ()
        self._trial: Trial | None = None
        self._tried: list[tuple[float, float]] = []
        self._spent = clock.read()
        self._chosen = ""
        """The compression that the last complete trial chose."""
        self._measured: deque[float] = deque(maxlen=MOST_STEPS)
        self._carried = 0
        self._moved = False

    def after_step(self) -> None:
        """Count a step. Collective when a trial begins, and after every few steps of it."""
        spent, before = self._clock.read(), self._spent
        taken = {phase: spent[phase] - before[phase] for phase in spent if phase not in BESIDE_TRAINING}
        self._spent = spent
        if self._trial is None:
            # Until then memory and libraries warm up.
            if self._reducer.steps >= self._reducer.uncompressed_steps:
                self._candidates = self._usable() if self._asked == "auto" else (self._asked,)
                self._begin(self._candidates)
        elif not self._trial.over:
            self._tried.append((sum(taken.values()), taken["allreduce"]))
            if len(self._tried) == TRIED_STEPS:
                self._record(self._trial)
        elif not self._moved:
            self._measured.append(sum(taken.values()))

    def follow(self) -> None:
        """Choose again for the currently carried parameters."""
        trial, count, before = self._trial, len(self._reducer.carried), self._carried
        if trial is None or count == before:
            return
        self._moved, self._carried = True, count
        if self._asked == "auto":
            # Fewer gradients need no stronger compression.
            most = self._candidates.index(trial.now) if trial.over and count < before else len(self._candidates)
            self._begin(self._candidates[: most + 1])

    def report(self) -> dict[str, Any]:
        """Return the choice and the measured steps; `step_seconds` is of the first cut."""
        found: dict[str, Any] = {}
        if self._trial is not None:
            medians, steps = self._trial.medians(), list(self._measured)[1:]
            found = {
                "compression": self._trial.now,
                "tried": {name: step for name, (step, _) in medians.items()},
                "waiting": {name: waiting for name, (_, waiting) in medians.items()},
                "step_seconds": statistics.median(steps) if steps else None,
            }
        return {"exchange": found}

    def state_dict(self) -> dict[str, Any]:
        """Return the choice and its reasons."""
        return {
            "trial": None if self._trial is None else self._trial.state_dict(),
            "tried": list(self._tried),
            "candidates": list(self._candidates),
            "chosen": self._chosen,
            "moved": self._moved,
            "carried": self._carried,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a choice; call it before the reducer's state is loaded, and after the clock's."""
        self._spent = self._clock.read()
        # Checkpoints of earlier versions have predictions instead: the choice is made again.
        if state.get("trial") is None or "candidates" not in state:
            return
        self._trial, self._candidates = Trial(**state["trial"]), tuple(state["candidates"])
        self._tried = [(step, waiting) for step, waiting in state["tried"]]
        self._chosen, self._moved, self._carried = state["chosen"], state["moved"], state["carried"]
        if self._asked == "auto":
            self._reducer.compression = self._trial.now

    def _usable(self) -> tuple[str, ...]:
        """Return the candidates that give equal bits on all ranks. Collective."""
        unequal = find_unequal_compressions(self._reducer.carried, self._world)
        if unequal:
            self._say("powersgd is not used: ranks have different processors or threads, so replicas would diverge")
        return tuple(name for name in CANDIDATES if name not in unequal)

    def _begin(self, names: Sequence[str]) -> None:
        self._trial, self._tried, self._carried = Trial(names), [], len(self._reducer.carried)
        self._use(self._trial.now)

    def _record(self, trial: Trial) -> None:
        """Record the steps of one compression. Collective."""
        gathered = self._world.allgather_object(self._tried, name="exchange.tried")
        self._tried = []
        steps = [step for step, _ in gathered[0]]
        # A rank waits for slower ranks too; the slowest rank waits for the network alone.
        waits = [min(waiting for _, waiting in ranks) for ranks in zip(*gathered, strict=True)]
        trial.add(statistics.median(steps[1:]), statistics.median(waits[1:]))
        self._use(trial.now)
        if trial.over:
            self._describe(trial)

    def _use(self, compression: str) -> None:
        """Use this compression from the next step on, if --compression is auto."""
        if self._asked == "auto" and compression != self._reducer.compression:
            self._reducer.compress(compression)

    def _describe(self, trial: Trial) -> None:
        """Log the choice, and advice."""
        before, self._chosen = self._chosen, trial.now
        if before:
            if trial.now != before:
                self._say(f"compression changed to {trial.now} at this cut (was {before})")
            return
        medians = trial.medians()
        steps = ", ".join(f"{name} {1e3 * s:.0f} ({1e3 * w:.0f} waiting)" for name, (s, w) in medians.items())
        chosen = f"; compression {trial.now} is chosen" if self._asked == "auto" else ""
        self._say(f"measured step, ms: {steps}{chosen}")
        step, waiting = medians[trial.now]
        if waiting > EXPOSED_SHARE * step:
            hidden = waiting * (1 - EXPOSED_SHARE) / EXPOSED_SHARE
            number = max(1, math.ceil(hidden * self._accumulate / (step - waiting)))
            self._say(
                f"{100 * waiting / step:.0f} % of a step is spent waiting for the exchange; "
                f"--accumulate {number} would reduce this to 10 % (a step then has {number} batches)"
            )


def find_unequal_compressions(named: Named, world: World) -> frozenset[str]:
    """Return the compressions of `CANDIDATES` that give different bits on different ranks. Collective."""
    local = {}
    for compression in CANDIDATES:
        kind, rank = parse_compression(compression)
        if kind == "powersgd":
            thin = [(name, parameter) for name, parameter in named if fits(parameter, rank=rank)]
            local[compression] = LowRankBucket("probe", thin, range(len(thin)), size=1, rank=rank).probe()
    gathered = world.allgather_object(local, name="gradients.low-rank.probes")
    return frozenset(name for name in local if any(other[name] != gathered[0][name] for other in gathered))


def open_compression_choice(
    reducer: Reducer,
    clock: PhaseClock,
    world: World,
    *,
    asked: str,
    accumulate: int,
    say: Callable[[str], None],
) -> CompressionChoice | None:
    """Return the choice; None on one machine unless --compression is auto. Collective."""
    several_nodes = any(size < world.size for size in world.allgather_object(world.local_size, name="exchange.nodes"))
    if world.size == 1 or not (several_nodes or asked == "auto"):
        return None
    return CompressionChoice(reducer, clock, world, asked=asked, accumulate=accumulate, say=say)
