"""How many rows a second does the cache's reader give, from a cold and from a warm page cache, on 1, 2 and 4 ranks?

    python -m analysis.cache_reads [--scratch DIR]    into analysis/results/cache_benefit/reads.csv; a minute or two
    python -m analysis.cache_reads --quick            only see that everything runs

Shuffled batches of 128 rows, found by sample id, as training reads them; every rank has its own file of about 100 MB
below --scratch, which must lie on the disk that is meant. Cold: nothing of the file is in memory, which is checked. The
page is written by `analysis.cache_benefit` or `analysis.figures`. Numbers of ranks that are there are not timed again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.benchmarks.launching import ROOT, environment
from analysis.cache_benefit import NAME, READS
from analysis.sweeps.kept import RESULTS, publish, stamp, texts_of
from analysis.sweeps.options import folder_to_write
from analysis.sweeps.sweep import SMOKE_RESULTS
from hvfreeze.errors import HvfreezeError, RefusedError
from hvfreeze.report.tables import to_csv

RANKS = (1, 2, 4)
REPEATS, QUICK_REPEATS, QUICK_PART = 7, 2, 16
QUICK_OUT = SMOKE_RESULTS / NAME


def main(arguments: Sequence[str] | None = None) -> int:
    """Time what is missing and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.cache_reads", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scratch", type=folder_to_write, default=Path("build"), help="where the files lie meanwhile [build]"
    )
    parser.add_argument(
        "--out", type=folder_to_write, help=f"folder for reads.csv [{RESULTS / NAME}; quick: {QUICK_OUT}]"
    )
    parser.add_argument("--quick", action="store_true", help="small files, few repetitions, 2 ranks")
    options = parser.parse_args(arguments)
    path = (options.out or (QUICK_OUT if options.quick else RESULTS / NAME)) / READS
    rows: list[dict[str, Any]] = texts_of(path).to_dict("records")
    try:
        for ranks in RANKS[1:2] if options.quick else RANKS:
            if not any(row["ranks"] == str(ranks) for row in rows):
                where = stamp()
                rows += [{**row, **where} for row in timed(ranks, options.scratch, quick=options.quick)]
                publish(path, to_csv(rows))
    except HvfreezeError as error:
        print(f"cache_reads: error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"rows: {path}")
    return 0


def timed(ranks: int, scratch: Path, *, quick: bool) -> list[dict[str, Any]]:
    """Return the rows of so many ranks.

    Raises:
        RefusedError: they failed.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cache-reads-", dir=scratch) as folder:
        out = Path(folder).resolve() / "rows.json"
        command = [
            *("mpirun", "-n", str(ranks), "--bind-to", "none", "--oversubscribe", "--timeout", "600"),
            *(sys.executable, "-m", "analysis.parts.read_rates", "--scratch", str(out.parent), "--out", str(out)),
            *("--repeats", str(QUICK_REPEATS if quick else REPEATS), "--part", str(QUICK_PART if quick else 1)),
        ]
        done = subprocess.run(command, env=environment(os.environ), cwd=ROOT, check=False)
        if done.returncode != 0 or not out.exists():
            raise RefusedError(f"{ranks} ranks that read a cache ended with exit code {done.returncode}, see above")
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
