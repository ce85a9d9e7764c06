"""Where a run's seconds go: every instant belongs to exactly one phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

STEP_PHASES = ("data", "forward", "backward", "allreduce", "optimizer", "vote", "cache_read", "cache_write")
BESIDE_TRAINING = ("checkpoint", "evaluate")
"""Phases that are no part of a step."""
PHASES = STEP_PHASES + BESIDE_TRAINING


class PhaseClock:
    """Adds up wall-clock seconds by phase, and this process's processor seconds, of all its threads, in them.

    Time that no phase claimed, such as the loop's own, belongs to the phase before it, so that all add up to the whole.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.processor = dict.fromkeys(PHASES, 0.0)
        self._phase = "data"
        self._since, self._processor_since = time.perf_counter(), time.process_time()

    def enter(self, phase: str) -> str:
        """Count time for `phase` from now on; return the phase that ended."""
        now, used = time.perf_counter(), time.process_time()
        self.seconds[self._phase] += now - self._since
        self.processor[self._phase] += used - self._processor_since
        self._since, self._processor_since = now, used
        ended, self._phase = self._phase, phase
        return ended

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count time for `phase` inside the block, then go on with the phase before it."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def restart(self) -> None:
        """Forget the time since the last switch of phases."""
        self._since, self._processor_since = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Return the seconds by phase up to now."""
        self.enter(self._phase)
        return dict(self.seconds)

    def processor_seconds(self) -> float:
        """Return the processor seconds of training up to now: those of all phases but evaluation and checkpoints."""
        self.enter(self._phase)
        return sum(used for phase, used in self.processor.items() if phase not in BESIDE_TRAINING)


def train_seconds(seconds: dict[str, float]) -> float:
    """Return the training time: all phases but evaluation."""
    return sum(value for phase, value in seconds.items() if phase != "evaluate")
