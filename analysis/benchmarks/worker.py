"""One rank of one case: started by `analysis.bench` through mpirun, writes its rows as they come."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import sys
import time
from pathlib import Path

import torch

from analysis.benchmarks.contest import UNFUSED, OutOfTimeError, Pace
from analysis.benchmarks.judging import Row
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.table import line, write_rows
from hvfreeze.comm.world import end_job_on_exception


def main() -> None:
    """Measure the rows that the command line asks for."""
    options = parse()
    torch.set_num_threads(1)
    ranks = Ranks()
    end_job_on_exception(ranks.world)
    case = importlib.import_module(f"analysis.benchmarks.rows.{options.case}")
    quick = Pace(cap_seconds=0, quick=True, min_pairs=2)
    pace = quick if options.quick else Pace(cap_seconds=options.seconds, until=time.perf_counter() + options.left)
    rows: list[Row] = []
    terminal = sys.stdout
    # The program's messages are no result of the benchmark.
    logging.disable(logging.WARNING)
    # Rows that are left over are told by whoever started this.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(OutOfTimeError):
        for row in case.measure(ranks, options.only.split(","), pace, options.scratch):
            rows.append(row)
            if ranks.rank == 0:
                write_rows(options.out, rows)
                print(line(row), file=terminal, flush=True)
    ranks.use(UNFUSED)
    ranks.world.close()


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m analysis.benchmarks.worker", description=__doc__)
    parser.add_argument("case", help="a module of rows/")
    parser.add_argument("--only", required=True, help="rows, separated by commas")
    parser.add_argument("--seconds", type=float, required=True, help="for each row")
    parser.add_argument("--left", type=float, required=True, help="seconds after which no row is begun")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder to fill")
    parser.add_argument("--out", type=Path, required=True, help="rank 0's rows as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
