"""`make demo`: fine-tune a ResNet-18 with 2 ranks, in full, frozen by vote, cached too, and hvfreeze auto; compare.

    python -m analysis.demo                       scikit-learn's digits: no network, under 3 minutes on 2 cores
    python -m analysis.demo --data-dir DIR        CIFAR-10 instead, also with $HVFREEZE_DATA set: some minutes
    python -m analysis.demo --data-dir DIR --weights FILE    starting from these weights

The network is first pretrained on one half of the classes, then fine-tuned on the other half (CIFAR-10: on all). Every
run is the real program, started with horovodrun; its files, figures and a report stay under --out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from analysis.parts.demo_stages import PRETRAINED, Stage, plan
from analysis.sweeps.options import folder_to_write
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError
from hvfreeze.report.comparison import compare, group_by_seed
from hvfreeze.report.report import write_report
from hvfreeze.report.tables import Table, factor, megabytes, number, percent, phase_table, shown
from hvfreeze.runs.reading import Run, load_runs
from hvfreeze.wording import plural

LAST_LINES = 12
TAG = re.compile(r"\[\d+,(?P<rank>\d+)\]<std(?:out|err)>:")
"""The prefix that horovodrun adds to each line of a rank, and sometimes the suffix."""


class StageError(HvfreezeError):
    """A stage failed; carries the program's exit code."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    options = parse(arguments)
    # An exception, so that the ranks are ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        demonstrate(options.out, ranks=options.ranks, data_dir=options.data_dir, weights=options.weights)
    except HvfreezeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m analysis.demo", description=__doc__.partition("\n")[0])
    data = os.environ.get("HVFREEZE_DATA")
    parser.add_argument(
        "--data-dir", type=Path, default=Path(data) if data else None, help="CIFAR-10 instead of digits"
    )
    parser.add_argument("--weights", type=Path, help="start from this state_dict instead of pretraining")
    parser.add_argument("--out", type=folder_to_write, default=Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"))
    parser.add_argument("--ranks", type=int, default=2)
    return parser.parse_args(arguments)


def demonstrate(out: Path, *, ranks: int, data_dir: Path | None, weights: Path | None) -> None:
    """Run all stages, print the table and write the report.

    Raises:
        HvfreezeError: what cannot be used, or which stage failed.
    """
    started = time.monotonic()
    check(out, ranks=ranks, weights=weights)
    stages = plan(out, data_dir=data_dir, weights=weights)
    for position, stage in enumerate(stages, 1):
        print(f"\n[{position}/{len(stages)}] {stage.title}", flush=True)
        run_stage(stage, ranks=ranks)
    compared = [stage.run_dir for stage in stages if stage.run_dir.name != PRETRAINED]
    runs = load_runs(compared)
    print("\n" + comparison_table(runs).to_text())
    print("One run each: a point of accuracy more or less, or a few percent of time, says nothing.")
    write_report(compared, out=out / "report")
    print(f"figures: {out / 'report' / 'figures'}\ndone in {time.monotonic() - started:.0f} s")


def check(out: Path, *, ranks: int, weights: Path | None) -> None:
    """Refuse what would fail minutes later."""
    if ranks < 1:
        raise UsageError(f"--ranks ({ranks}) must be at least 1")
    if weights is not None and not weights.is_file():
        raise UsageError(f"--weights ({weights}) must be a file")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out ({out}) must be a new or an empty folder")
    if ranks > 1 and shutil.which("horovodrun", path=environment(ranks)["PATH"]) is None:
        raise RefusedError("horovodrun is not there; run `make setup` first, or use --ranks 1")


def run_stage(stage: Stage, *, ranks: int) -> None:
    """Run the program, showing rank 0's lines and writing all of them to a log next to the run directory.

    Raises:
        StageError: the program failed; with its last lines.
    """
    command = launch(ranks, (*stage.command, *stage.flags, "--run-dir", str(stage.run_dir)))
    log = stage.run_dir.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        file.write(shlex.join(command) + "\n")
        code = follow(command, file, environment=environment(ranks))
    if code != 0:
        raise StageError(f"'{stage.title}' failed with exit code {code}:\n{last_words(log)}\nall: {log}", code=code)
    print(f"  {time.monotonic() - started:.0f} s with start-up", flush=True)


def follow(command: Sequence[str], log: IO[str], *, environment: Mapping[str, str]) -> int:
    """Run a command, copying its output to the log and rank 0's progress to the screen; return its exit code."""
    # A session of its own: horovodrun is a shell around mpirun, and a signal must reach both.
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            for line in process.stdout or ():
                log.write(line)
                if is_progress(line):
                    print("  " + TAG.sub("", line.rstrip()), flush=True)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
    return process.returncode


def last_words(log: Path) -> str:
    """Return the last lines that ranks wrote; where none came so far, the launcher's."""
    lines = log.read_text(encoding="utf-8").splitlines()[1:]
    from_ranks = [TAG.sub("", line) for line in lines if TAG.match(line)]
    return "\n".join(f"    {line}" for line in (from_ranks or lines)[-LAST_LINES:])


def is_progress(line: str) -> bool:
    """Return whether a line of output says how far the run is: rank 0's about epochs and steps."""
    tag = TAG.match(line)
    return (tag is None or tag["rank"] == "0") and TAG.sub("", line).startswith(("epoch ", "step ", "resnet18 "))


def launch(ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts the program with this many ranks on this machine."""
    launcher = ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}"] if ranks > 1 else []
    return [*launcher, "hvfreeze", *arguments]


def environment(ranks: int) -> dict[str, str]:
    """Return the environment of the launcher and so of every rank: this interpreter's programs first."""
    found = dict(os.environ)
    programs = str(Path(sys.executable).parent)
    found["PATH"] = programs + os.pathsep + found.get("PATH", os.defpath)
    found.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    found.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if os.geteuid() == 0:
        found.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return found


def comparison_table(runs: Sequence[Run]) -> Table:
    """Return what came of the runs, a column each: seconds by phase, gain, accuracy and cuts."""
    groups = group_by_seed(runs)
    phases = phase_table(groups)
    # A run of another kind than the first, as one that trains nothing, has no baseline but the first run's time.
    parts = [run.train_seconds / max(runs[0].train_seconds, 1e-9) for run in runs]
    compared = list(zip([compare(group, groups) for group in groups], parts))
    rows = [
        ("training time", *phases.rows[-1][1:]),
        *((f"- {name}", *cells) for name, *cells in phases.rows[:-1]),
        ("speed-up", *(shown(gain.speed_up, factor) if gain else factor(1 / part) for gain, part in compared)),
        ("time saved", *(shown(gain.time_saved, percent) if gain else percent(1 - part) for gain, part in compared)),
        ("images/s", *(number(run.images_per_second) for run in runs)),
        ("gradients exchanged by a rank", *(megabytes(run.allreduce_bytes) for run in runs)),
        ("test accuracy, last epoch", *(percent(run.test_accuracy) for run in runs)),
        ("test accuracy, best epoch", *(percent(run.best_accuracy) for run in runs)),
        ("cut (epoch of the change)", *(cut_history(run) for run in runs)),
    ]
    return Table(columns=(plural(runs[0].size, "rank"), *(run.name for run in runs)), rows=tuple(rows))


def cut_history(run: Run) -> str:
    """Return the cuts that a run had, each but the first with the epoch it began in."""
    first, *changes = run.cut_history
    return ", ".join([str(first.cut), *(f"{move.cut} ({move.epoch})" for move in changes)])


if __name__ == "__main__":
    sys.exit(main())
