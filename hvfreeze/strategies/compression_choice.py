"""Chooses the gradient compression by measurements: of the network, of the first steps and, with `auto`, by trials.

The network is measured before training, a rank's own steps during the first few, which are uncompressed anyway. Then
rank 0 predicts a step with each compression. With `auto` it chooses one, and tries in a few steps whether more lossy
ones are faster. After a change of the cut it chooses again from the same measurements. The choice depends on clocks, so
it is recorded in the run and in the checkpoint.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvfreeze.comm.compression_cost import (
    CANDIDATES,
    CHOSEN,
    EXPOSED_SHARE,
    Network,
    StepForecast,
    Steps,
    batches_that_hide,
    choose,
    choose_shortest,
    find_unequal_compressions,
    forecast,
    measure_network,
    own_seconds,
    worth_trying,
)
from hvfreeze.comm.gradient_exchange import messages_of
from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.world import World
from hvfreeze.runs.clock import BESIDE_TRAINING, PhaseClock

TRIED_STEPS = 4
"""Steps per compression and round; the first, which allocates buffers, is not counted."""
ROUNDS = 3
"""Rounds: a disturbance of a few steps affects one compression in one round, and the median of three ignores it."""


class CompressionTrial:
    """Tries compressions in rounds, and keeps the least lossy of the fastest.

    A prediction uses what a rank computes and what the network sends. It ignores contention for memory bandwidth and
    the processor time of messages; measured steps include both. Every other round is in reverse order, so that a
    steadily changing speed favours none.

    `names` are in order of loss. The first is the predicted choice; if it is the only one, there is no trial. `rounds`
    are the seconds of the steps tried so far, by round.
    """

    def __init__(self, names: Sequence[str], rounds: Sequence[Mapping[str, float]] = ()) -> None:
        self._names = tuple(names)
        self._rounds = [dict(each) for each in rounds]

    @property
    def over(self) -> bool:
        """Whether the trial is over, so that `now` is final."""
        return len(self._names) == 1 or self._complete == ROUNDS

    @property
    def now(self) -> str:
        """The compression of the next steps."""
        if self.over:
            return choose_shortest(self.medians) if self.medians else self._names[0]
        tried = self._rounds[self._complete] if self._complete < len(self._rounds) else {}
        order = reversed(self._names) if self._complete % 2 else self._names
        return next(name for name in order if name not in tried)

    @property
    def medians(self) -> Mapping[str, float]:
        """The tried compressions with the seconds of their steps: medians over rounds."""
        taken = {name: [each[name] for each in self._rounds if name in each] for name in self._names}
        return {name: statistics.median(seconds) for name, seconds in taken.items() if seconds}

    def add(self, seconds: Sequence[float]) -> None:
        """Record TRIED_STEPS steps of `now`, and continue or stop; a more lossy one must save a minimum share."""
        assert not self.over, "the trial is over"
        name, number = self.now, self._complete
        if number == len(self._rounds):
            self._rounds.append({})
        self._rounds[number][name] = statistics.median(seconds[1:])

    @property
    def _complete(self) -> int:
        """Number of complete rounds."""
        return sum(len(each) == len(self._names) for each in self._rounds)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trial, as arguments of `CompressionTrial`."""
        return {"names": list(self._names), "rounds": [dict(each) for each in self._rounds]}


MOST_STEPS = 1000
"""Number of steps whose median is reported."""


class CompressionChoice:
    """Watches the first steps, predicts the others, and sets the reducer's compression.

    `asked` is --compression, `accumulate` the number of batches per step; `say` logs a line for the user.
    """

    def __init__(
        self,
        reducer: Reducer,
        clock: PhaseClock,
        world: World,
        network: Network,
        *,
        asked: str,
        accumulate: int,
        say: Callable[[str], None],
    ) -> None:
        self._reducer, self._clock, self._world, self._network = reducer, clock, world, network
        self._asked, self._accumulate, self._say = asked, accumulate, say
        self._trial: CompressionTrial | None = None
        self._trying: list[float] = []
        self._steps: Steps | None = None
        self._forecasts: dict[str, StepForecast] = {}
        self._watched: list[tuple[dict[str, float], dict[str, float]]] = []
        self._spent = clock.read()
        self._unequal: frozenset[str] | None = None
        """Compressions that auto must not choose; None until known."""
        self._measured: deque[float] = deque(maxlen=MOST_STEPS)
        self._carried = 0
        self._moved = False

    def after_step(self) -> None:
        """Count a step; after the first few choose by prediction, then by measured steps. Collective."""
        spent, before = self._clock.read(), self._spent
        taken = {phase: spent[phase] - before[phase] for phase in spent if phase not in BESIDE_TRAINING}
        self._spent = spent
        if self._trial is None:
            self._watched.append((taken, dict(self._reducer.ready_seconds)))
            if self._reducer.steps >= self._reducer.uncompressed_steps and len(self._watched) >= ROUNDS:
                # All wait for the slowest rank.
                gathered = self._world.allgather_object(self._seen(), name="exchange.steps")
                self._steps = max(gathered, key=lambda steps: steps.compute)
                self._choose()
                self._describe()
        elif not self._trial.over:
            self._try(sum(taken.values()), self._trial)
        elif not self._moved:
            self._measured.append(sum(taken.values()))

    def follow(self) -> None:
        """Choose again for the currently carried parameters. Collective."""
        if self._trial is not None and len(self._reducer.carried) != self._carried:
            self._moved = True
            before, chosen = self._trial.now, self._choose().now
            if chosen != before:
                self._say(f"compression changed to {chosen} at this cut (was {before})")

    def report(self) -> dict[str, Any]:
        """Return measurements, predictions and the choice; seconds of a step are those at the first cut."""
        line_rate = self._network.line_rate(self._world.size)
        found: dict[str, Any] = {"bits_per_second": line_rate, "latency_seconds": self._network.latency_seconds}
        if self._trial is not None:
            # The first step after the choice lays out anew.
            steps = list(self._measured)[1:]
            found |= {
                "compression": self._trial.now,
                "tried": dict(self._trial.medians),
                "forecast": {name: asdict(each) for name, each in self._forecasts.items()},
                "step_seconds": statistics.median(steps) if steps else None,
            }
        return {"exchange": found}

    def state_dict(self) -> dict[str, Any]:
        """Return the choice and its reasons."""
        return {
            "trial": None if self._trial is None else self._trial.state_dict(),
            "trying": list(self._trying),
            "watched": list(self._watched) if self._trial is None else [],
            "network": asdict(self._network),
            "steps": None if self._steps is None else asdict(self._steps),
            "forecasts": {name: asdict(each) for name, each in self._forecasts.items()},
            "moved": self._moved,
            "carried": self._carried,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a choice; call it before the reducer's state is loaded, and after the clock's."""
        self._spent = self._clock.read()
        self._watched = [(taken, ready) for taken, ready in state.get("watched", ())]
        if state.get("trial") is None:
            return
        self._trial, self._trying = CompressionTrial(**state["trial"]), list(state["trying"])
        self._moved, self._carried = state["moved"], state["carried"]
        self._network, self._steps = Network(**state["network"]), Steps(**state["steps"])
        self._forecasts = {name: StepForecast(**each) for name, each in state["forecasts"].items()}
        if self._asked == "auto":
            self._reducer.compression = self._trial.now

    def _seen(self) -> Steps:
        """Return this rank's measured steps, without the first ones, in which memory and libraries warm up."""
        watched = self._watched[len(self._watched) // 3 :]
        ready = {
            name: statistics.median(times[name] for _, times in watched if name in times) for name in watched[-1][1]
        }
        backward = statistics.median(taken["backward"] for taken, _ in watched) / self._accumulate
        computing = statistics.median(sum(taken.values()) - taken["allreduce"] for taken, _ in watched)
        # Halves are made in the backward pass, and from the first step on.
        own = own_seconds(self._reducer.carried, "fp16") if self._asked == "fp16" else 0.0
        return Steps(ready=ready, backward=backward - own, rest=computing - backward)

    def _choose(self) -> CompressionTrial:
        """Predict a step with each compression on rank 0; all ranks start with its choice. Collective."""
        found: tuple[dict[str, StepForecast], tuple[str, ...]] | None = None
        if self._asked == "auto" and self._unequal is None:
            self._unequal = find_unequal_compressions(self._reducer.carried, self._world)
            if self._unequal:
                self._say("powersgd is not used: ranks have different processors or threads, so replicas would diverge")
        if self._world.rank == 0:
            forecasts, asked = self._forecast(), (self._asked,)
            free = {name: forecasts[name] for name in CHOSEN if name not in (self._unequal or ())}
            found = forecasts, worth_trying(free, choose(free)) if self._asked == "auto" else asked
        chosen = self._world.broadcast_object(found, name="exchange.chosen")
        assert chosen is not None
        forecasts, names = chosen
        if not self._moved:
            self._forecasts = forecasts
        self._trial, self._trying, self._carried = CompressionTrial(names), [], len(self._reducer.carried)
        self._use(self._trial.now)
        return self._trial

    def _try(self, seconds: float, trial: CompressionTrial) -> None:
        """Count a step of the trial; after enough steps, all ranks follow rank 0's clock. Collective then."""
        self._trying.append(seconds)
        if len(self._trying) == TRIED_STEPS:
            trial.add(self._world.broadcast_object(self._trying, name="exchange.tried"))
            self._trying = []
            self._use(trial.now)
            if trial.over:
                medians = ", ".join(f"{name} {1e3 * median:.0f}" for name, median in trial.medians.items())
                self._say(f"measured step, ms: {medians}; compression stays {trial.now}")

    def _use(self, compression: str) -> None:
        """Use this compression from the next step on, if --compression is auto."""
        if self._asked == "auto" and compression != self._reducer.compression:
            self._reducer.compress(compression)

    def _forecast(self) -> dict[str, StepForecast]:
        assert self._steps is not None
        named, size, bucket_bytes = self._reducer.carried, self._world.size, self._reducer.bucket_bytes
        names, found = [name for name, _ in named], {}
        for compression in dict.fromkeys([*CANDIDATES, *([] if self._asked == "auto" else [self._asked])]):
            messages = messages_of(named, compression=compression, size=size, bucket_bytes=bucket_bytes)
            own = own_seconds(named, compression)
            found[compression] = forecast(messages, names, self._steps, self._network, own_seconds=own)
        return found

    def _describe(self) -> None:
        """Log the costs of the network, and advice."""
        assert self._steps is not None and self._trial is not None
        chosen = self._trial.now
        rate, milliseconds = self._network.line_rate(self._world.size) / 1e6, 1e3 * self._network.latency_seconds
        steps = ", ".join(
            f"{name} {1e3 * each.step:.0f}" + (f" ({1e3 * each.exposed:.0f} waiting)" if each.exposed > 5e-4 else "")
            for name, each in self._forecasts.items()
        )
        is_chosen = " is chosen" if self._asked == "auto" else ""
        self._say(f"network: {rate:.0f} Mbit/s per rank during the exchange, {milliseconds:.1f} ms per message")
        self._say(f"predicted step, ms: {steps}; compression {chosen}{is_chosen}")
        exposed, compute = self._forecasts[chosen].exposed, self._steps.compute
        if exposed > EXPOSED_SHARE * compute:
            number = batches_that_hide(exposed, compute / self._accumulate)
            self._say(
                f"{100 * exposed / (exposed + compute):.0f} % of a step is spent waiting for the exchange; "
                f"--accumulate {number} would reduce this to 10 % (a step then has {number} batches)"
            )


def open_compression_choice(
    reducer: Reducer,
    clock: PhaseClock,
    world: World,
    *,
    asked: str,
    accumulate: int,
    say: Callable[[str], None],
) -> CompressionChoice | None:
    """Measure the network and return the choice; None on one machine unless --compression is auto. Collective."""
    several_nodes = any(size < world.size for size in world.allgather_object(world.local_size, name="exchange.nodes"))
    if world.size == 1 or not (several_nodes or asked == "auto"):
        return None
    network = measure_network(world)
    return CompressionChoice(reducer, clock, world, network, asked=asked, accumulate=accumulate, say=say)
