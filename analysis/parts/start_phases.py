"""One rank of `hvfreeze train` whose start is timed: python -m analysis.parts.start_phases OUT LAUNCHED train FLAGS.

LAUNCHED is the launcher's `time.monotonic()`. OUT/RANK.json gets seconds and CPU seconds by phase, up to the end of the
first step, after which the run is asked to leave.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TORCH = "import torch"
REST = "the rest"
PHASES = (
    "launcher",
    TORCH,
    "other imports",
    "MPI and Horovod",
    "file list",
    "model",
    "decoding",
    "mirror images",
    REST,
    "first step",
)


class Marks:
    """Seconds and CPU seconds of this process by phase; each mark gives a phase what was spent since the one before."""

    def __init__(self, launched: float) -> None:
        self.seconds, self.cpu_seconds = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        self._at, self._cpu_at = launched, 0.0

    def __call__(self, phase: str) -> None:
        """Give `phase` what was spent since the mark before."""
        now, cpu = time.monotonic(), time.process_time()
        self.seconds[phase] += now - self._at
        self.cpu_seconds[phase] += cpu - self._cpu_at
        self._at, self._cpu_at = now, cpu

    def around(self, module: ModuleType, name: str, phase: str, then: Callable[[], object] = lambda: None) -> None:
        """Let every call of a module's function be a phase; what came before it is the rest."""
        function = getattr(module, name)

        def marked(*values: Any, **named: Any) -> Any:
            self(REST)
            result = function(*values, **named)
            self(phase)
            then()
            return result

        setattr(module, name, marked)


def main(out: str, launched: float, words: Sequence[str]) -> int:
    """Train up to the end of the first step; return the exit code, which says that the run was asked to leave."""
    marks = Marks(launched)
    marks("launcher")
    import torch

    assert torch.get_num_threads() > 0
    marks(TORCH)
    from hvfreeze import __main__ as program
    from hvfreeze.comm import horovod_world

    def follow() -> None:
        from hvfreeze.training import build, loop
        from hvfreeze.training import run as running

        marks("other imports")
        for name, phase in (
            ("agreed_corpus", "file list"),
            ("equal_model", "model"),
            ("load_share", "decoding"),
            ("find_out", "mirror images"),
        ):
            marks.around(build, name, phase)
        marks.around(running, "prepare", REST)
        marks.around(loop, "train_step", "first step", leave)

    def leave() -> None:
        path = Path(out, f"{os.environ.get('OMPI_COMM_WORLD_RANK', '0')}.json")
        if not path.exists():
            found = {"seconds": marks.seconds, "cpu_seconds": marks.cpu_seconds}
            path.write_text(json.dumps(found), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGUSR1)

    marks("other imports")
    opened = horovod_world.open_world

    def open_world(**named: Any) -> Any:
        marks("other imports")
        world = opened(**named)
        marks("MPI and Horovod")
        follow()
        return world

    horovod_world.open_world = open_world
    return program.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
