"""Measures the time of a run by phase: every instant belongs to exactly one phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

STEP_PHASES = ("data", "forward", "backward", "allreduce", "optimizer", "vote", "cache_read", "cache_write")
BESIDE_TRAINING = ("checkpoint", "evaluate")
"""Phases that are not part of a training step."""
PHASES = STEP_PHASES + BESIDE_TRAINING
SET_UP_PHASES = ("other", "start", "listing", "headers", "model", "decoding", "duplicates", "flips")
"""Phases before training: imports and MPI, the list of files, special conversions, the model and its weights, pixels,
equal images, and the trial of horizontal flips.
"""


class PhaseClock:
    """Sums wall-clock seconds by phase, and the processor seconds of all threads of this process.

    It starts in the first of `phases`. Time outside of any phase, such as the loop's own, belongs to the previous
    phase, so the sum is the total time.
    """

    def __init__(self, phases: Sequence[str] = PHASES) -> None:
        self.seconds = dict.fromkeys(phases, 0.0)
        self.processor = dict.fromkeys(phases, 0.0)
        self._phase = phases[0]
        self._since, self._processor_since = time.perf_counter(), time.process_time()

    def enter(self, phase: str) -> str:
        """Start phase `phase`; return the previous phase."""
        now, used = time.perf_counter(), time.process_time()
        self.seconds[self._phase] += now - self._since
        self.processor[self._phase] += used - self._processor_since
        self._since, self._processor_since = now, used
        ended, self._phase = self._phase, phase
        return ended

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Run the block in phase `phase`, then return to the previous phase."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def restart(self) -> None:
        """Drop the time since the last change of phases."""
        self._since, self._processor_since = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase up to now."""
        self.enter(self._phase)
        return dict(self.seconds)

    def processor_seconds(self) -> float:
        """Return the processor seconds of training up to now: all phases except evaluation and checkpoints."""
        self.enter(self._phase)
        return sum(used for phase, used in self.processor.items() if phase not in BESIDE_TRAINING)


def train_seconds(seconds: dict[str, float]) -> float:
    """Return the seconds of training: all phases except evaluation."""
    return sum(value for phase, value in seconds.items() if phase != "evaluate")
