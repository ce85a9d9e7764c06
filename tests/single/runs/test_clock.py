from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvfreeze.runs import clock as module
from hvfreeze.runs.clock import PhaseClock


def test_processor_seconds_are_those_of_the_phases_in_which_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = [100.0], [7.0]
    times = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: used[0])
    monkeypatch.setattr(module, "time", times)

    def spend(seconds: float, *, threads: float = 1.0) -> None:
        now[0] += seconds
        used[0] += seconds * threads

    clock = PhaseClock()
    spend(9)
    clock.restart()
    spend(1, threads=2)
    clock.enter("forward")
    spend(2)
    with clock.within("evaluate"):
        spend(30)
    with clock.within("checkpoint"):
        spend(40)
    spend(3, threads=0.5)
    assert clock.processor_seconds() == 2 + 2 + 1.5
    seconds = clock.read()
    assert (seconds["data"], seconds["forward"], seconds["evaluate"], seconds["checkpoint"]) == (1, 5, 30, 40)
