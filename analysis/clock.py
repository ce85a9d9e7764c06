"""What does the whole command take, starting, reading images, evaluating and leaving included, on 1, 2 and 4 ranks?

    python -m analysis.clock --data-dir DIR --weights FILE --weights64 FILE [--out DIR]

`hvfreeze auto` and the shortest full fine-tuning that is within half a point of the best, as the kept results of
analysis.peers and peers64 have it, with the learning rate that it has there; ways in turn, on an idle machine. On other
than two ranks one epoch of full fine-tuning is made, and the others take as long. Rows that are there stay.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.parts.peers import Cell, by_samples, cell_of, shortest
from analysis.peers import PEERS, Task
from analysis.sweeps.kept import RESULTS, publish, stamp, texts_of, told_of
from analysis.sweeps.launching import Site, command_of, follow
from analysis.sweeps.options import folder_to_write
from analysis.sweeps.pages import Page, Words
from analysis.sweeps.presets import REDUCED
from analysis.sweeps.results import open_results
from hvfreeze.errors import HvfreezeError, RefusedError
from hvfreeze.report.tables import factor, seconds, to_csv

RANKS = (2, 1, 4)
MEASURED_IN_FULL = 2
NAME = "clock"
UNSTAMPED = "AMD EPYC, 4 cores, one thread a rank; torch 2.13.0+cpu, horovod 0.28.1"
"""Machine and versions of kept rows that name none."""
PIXELS = {"peers": 32, "peers64": 64}
WAYS = {"auto": "`hvfreeze auto --epochs 1`", "auto-one-view": "the same, `--flips off`", "full": "full fine-tuning"}
COMPARED = {"peers": 1, "peers64": 2}
"""Experiment -> times the preset's image size."""
SECONDS = 1200.0
"""After which a command hangs."""


@dataclass(frozen=True)
class Timed:
    """A command that is timed: a way on so many ranks, and the experiment whose kept results it belongs to."""

    experiment: str
    cell: Cell
    lr: float
    ranks: int

    @property
    def epochs(self) -> int:
        """Epochs that are made."""
        return self.cell.epochs if self.ranks == MEASURED_IN_FULL else 1

    def key(self, repeat: int) -> dict[str, str]:
        """Return what tells its row from the others."""
        found = {"experiment": self.experiment, "samples": self.cell.samples, "way": self.cell.peer}
        return {name: str(value) for name, value in {**found, "ranks": self.ranks, "repeat": repeat}.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write it up row by row; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.clock", description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="CIFAR-10")
    parser.add_argument("--weights", type=Path, required=True, help="of a ResNet-18 trained at 32 pixels")
    parser.add_argument("--weights64", type=Path, required=True, help="of one trained at 64 pixels")
    parser.add_argument("--out", type=folder_to_write, default=RESULTS / NAME, help="folder for rows.csv and README.md")
    parser.add_argument("--repeats", type=int, default=1, help="of every command (1)")
    options = parser.parse_args(arguments)
    weights = {"peers": options.weights, "peers64": options.weights64}
    try:
        rows = texts_of(options.out / "rows.csv").to_dict("records")
        for repeat in range(options.repeats):
            for timed in commands():
                key = timed.key(repeat)
                if not any(key.items() <= row.items() for row in rows):
                    made = measure(
                        timed, Site(work=options.out, data_dir=options.data_dir, weights=weights[timed.experiment])
                    )
                    rows.append({**key, **{name: str(value) for name, value in made.items()}})
                    publish(options.out / "rows.csv", to_csv(rows))
                    print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        PAGE.write(options.out.parent, options.out)
    except HvfreezeError as error:
        print(f"clock: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def commands() -> Iterator[Timed]:
    """Yield what is timed."""
    for ranks in RANKS:
        for experiment in COMPARED:
            for samples, own in by_samples(open_results(RESULTS, experiment)):
                full = shortest(own, full=True)
                if full is None:
                    continue
                for way in ("auto", "auto-one-view", "full"):
                    cell = cell_of(full) if way == "full" else Cell(samples=samples, peer=way, epochs=1)
                    yield Timed(experiment, cell, float(own.of(cell.label)[0]["lr"]), ranks)


def measure(timed: Timed, site: Site) -> dict[str, Any]:
    """Return what a command took.

    Raises:
        RefusedError: it failed, or hangs.
    """
    assert site.weights is not None
    preset, cell = replace(REDUCED, weights=site.weights.name), replace(timed.cell, epochs=timed.epochs)
    flags = Task(larger=COMPARED[timed.experiment]).work(preset, cell, PEERS[cell.peer])
    planned = preset.run(cell.label, 0, {**flags, "lr": timed.lr}, ranks=timed.ranks)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder) / "run", Path(folder) / "log.txt"
        start = time.perf_counter()
        if follow(command_of(planned, site, run_dir), log, timeout=SECONDS) != 0:
            last = log.read_text(errors="replace").splitlines()[-3:]
            raise RefusedError(f"{cell.label} on {timed.ranks} ranks failed: {' / '.join(last)}")
        whole = time.perf_counter() - start
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return {
        "epochs": timed.cell.epochs,
        "epochs_made": timed.epochs,
        "whole_seconds": round(whole, 3),
        "train_seconds": round(summary["train_seconds"], 3),
        "evaluate_seconds": round(summary["seconds"]["evaluate"], 3),
        "test_accuracy": summary["test_accuracy"],
        **stamp(),
    }


@dataclass(frozen=True)
class Commands:
    """Times of whole commands; epochs that were not run are assumed to last as long as the others."""

    rows: pd.DataFrame

    @classmethod
    def of(cls, root: Path) -> Commands:
        """Return the recorded rows."""
        rows = pd.read_csv(root / NAME / "rows.csv", keep_default_na=False)
        missing = rows["train_seconds"] * (rows["epochs"] - rows["epochs_made"]) / rows["epochs_made"]
        return cls(rows.assign(whole=rows["whole_seconds"] + missing, train=rows["train_seconds"] + missing))

    def tasks(self) -> list[tuple[str, int]]:
        """Return experiments and numbers of samples."""
        return list(self.rows.groupby(["experiment", "samples"], sort=False).groups)

    def mean(self, task: tuple[str, int], way: str, what: str, ranks: int = 2) -> float:
        """Return the mean seconds of a way's commands, `whole` or `train`; NaN where there are none."""
        wanted = {"experiment": task[0], "samples": task[1], "way": way, "ranks": ranks}
        mine = self.rows[(self.rows[list(wanted)] == list(wanted.values())).all(axis=1)]
        return float(mine[what].mean())

    def faster(self, task: tuple[str, int], way: str, what: str = "whole") -> str:
        """Return how many times as fast a way is as full fine-tuning on two ranks."""
        return factor(self.mean(task, "full", what) / self.mean(task, way, what))

    def epochs(self, task: tuple[str, int]) -> int:
        """Return how long full fine-tuning was."""
        return int(self.mean(task, "full", "epochs"))

    def evaluating(self, task: tuple[str, int]) -> str:
        """Return the mean seconds of evaluation."""
        return seconds(sum(self.mean(task, way, "evaluate_seconds") for way in WAYS) / len(WAYS))


def words(root: Path) -> Words:
    commands = Commands.of(root)
    return {
        "commands": commands,
        "ways": WAYS,
        "pixels": PIXELS,
        "told": told_of(texts_of(root / NAME / "rows.csv"), unstamped=UNSTAMPED),
    }


PAGE = Page(NAME, words)

if __name__ == "__main__":
    sys.exit(main())
