"""Run files of other programs with the flags of `hvfreeze train`."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from hvfreeze.cli import parse
from hvfreeze.config.flags import configuration
from hvfreeze.config.tree import Config, to_dict
from hvfreeze.errors import HvfreezeError
from hvfreeze.runs.clock import PhaseClock, train_seconds
from hvfreeze.runs.environment import describe_environment, facts_of_this_rank


def run_script(name: str, run: Callable[[Config], None], arguments: Sequence[str] | None) -> int:
    """Call `run` with the configuration of the flags, by default the command line's, and return the exit code."""
    try:
        run(configuration(parse(list(sys.argv[1:] if arguments is None else arguments))))
    except HvfreezeError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def describe(run_dir: Path, config: Config, *, program: str, size: int) -> None:
    """Write what a run directory says before training."""
    tree = {**to_dict(config), "program": {"program": program}}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    known = {**describe_environment([facts_of_this_rank()]), "size": size, "hosts": [socket.gethostname()] * size}
    (run_dir / "environment.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    (run_dir / "decisions.jsonl").touch()


class EpochLines:
    """The lines of metrics.jsonl, which one of `size` ranks writes and tells as epochs end."""

    def __init__(self, run_dir: Path, clock: PhaseClock, *, size: int, batch_size: int, writes: bool) -> None:
        self.lines: list[dict[str, Any]] = []
        self._run_dir, self._clock, self._size, self._writes = run_dir, clock, size, writes
        self._images_per_step = batch_size * size
        self._before: dict[str, float] = {}

    def add(self, line: dict[str, Any], *, step: int) -> None:
        """Add an epoch's line, with its seconds; `step` steps are made."""
        now = self._clock.read()
        spent = {phase: value - self._before.get(phase, 0.0) for phase, value in now.items()}
        self._before, seconds = now, train_seconds(spent)
        images = (step - (self.lines[-1]["step"] if self.lines else 0)) * self._images_per_step
        self.lines.append(
            {
                "epoch": len(self.lines),
                "step": step,
                **line,
                "train_seconds": seconds,
                "seconds": spent,
                "images_per_second": images / max(seconds, 1e-9),
                "cache": {"mode": "off"},
            }
        )
        if self._writes:
            with (self._run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.lines[-1]) + "\n")
            accuracy = line["test_accuracy"]
            tested = "not evaluated" if accuracy is None else f"test {100 * accuracy:.2f} %"
            print(f"epoch {len(self.lines) - 1}: {tested}, {seconds:.1f} s", flush=True)

    def conclude(self, *, cut_history: Sequence[Sequence[int]]) -> None:
        """Write summary.json."""
        seconds, last = self._clock.read(), self.lines[-1]
        spent = train_seconds(seconds)
        summary = {
            "test_accuracy": last["test_accuracy"],
            "best_test_accuracy": max(
                line["test_accuracy"] for line in self.lines if line["test_accuracy"] is not None
            ),
            "epochs": len(self.lines),
            "steps": last["step"],
            "world_size": self._size,
            "train_seconds": spent,
            "seconds": seconds,
            "images_per_second": last["step"] * self._images_per_step / max(spent, 1e-9),
            "allreduce_bytes": last["allreduce_bytes"],
            "final_cut": last["cut"],
            "cut_history": [list(move) for move in cut_history],
        }
        (self._run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
