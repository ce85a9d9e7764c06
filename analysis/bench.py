"""`make bench`: the time of hvfreeze over that of hand-written reference loops, into build/bench.json.

    python -m analysis.bench                          everything, in 15 minutes on 2 idle cores; a slower machine lists
    the cases that it did not reach python -m analysis.bench --only NAME[,NAME]       these rows, merged into the file
    python -m analysis.bench --list                   the names
    python -m analysis.bench --quick                  only see that everything runs, into build/smoke-results

Both sides of a row run in the same two ranks and take turns, so that other load affects both.
`ratio` is the median of the pairs, `low` and `high` its 95 % bootstrap interval; a row is ok when `high` keeps the
bound, or `low` does and the interval is at most 6 % wide. Use a machine that is otherwise idle.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from analysis.benchmarks.cases import CASES, ROWS, TOTAL_SECONDS, Case
from analysis.benchmarks.judging import Row
from analysis.benchmarks.launching import run_case, why_missing
from analysis.benchmarks.table import HEADER, merged, read_rows, table, write_rows
from analysis.sweeps.options import file_to_write
from hvfreeze.errors import HvfreezeError, UsageError
from hvfreeze.wording import did_you_mean, plural

OUT = Path("build") / "bench.json"
QUICK_OUT = OUT.parent / "smoke-results" / OUT.name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return 1 when a row failed, else 0, also where rows miss their bounds or were not reached."""
    options = parse(arguments)
    if options.list:
        print("\n".join(ROWS))
        return 0
    try:
        wanted = choose(options.only)
    except HvfreezeError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return error.exit_code
    rows, failed, left_over = measure(wanted, quick=options.quick, out=options.out)
    print("\n" + table(rows) + f"\n\nwritten to {options.out}")
    if left_over:
        names, where = ",".join(left_over), "" if options.out == OUT else f" --out {shlex.quote(str(options.out))}"
        print(
            f"bench: note: {plural(len(left_over), 'row was', 'rows were')} not reached within {TOTAL_SECONDS:.0f} s; "
            f"to continue: python -m analysis.bench --only {names}{where}"
        )
    for name, why in failed.items():
        print(f"bench: error: {name} could not be measured: {why}; to try again: --only {name}", file=sys.stderr)
    return 1 if failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME[,NAME]", help="measure these rows and merge them into the file")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    parser.add_argument("--quick", action="store_true", help="tiny batches and two pairs: see that everything runs")
    parser.add_argument("--out", type=file_to_write, help=f"the file ({OUT}; quick: {QUICK_OUT})")
    options = parser.parse_args(arguments)
    options.out = options.out or (QUICK_OUT if options.quick else OUT)
    return options


def choose(only: str | None) -> tuple[str, ...]:
    """Return the rows to measure.

    Raises:
        UsageError: a name is no row's.
    """
    if only is None:
        return ROWS
    names = tuple(name.strip() for name in only.split(","))
    for name in names:
        if name not in ROWS:
            hint = did_you_mean(name, dict.fromkeys(ROWS))
            raise UsageError(f"--only ({name}) must be the name of a row{hint}; --list shows them all")
    return names


def measure(wanted: tuple[str, ...], *, quick: bool, out: Path) -> tuple[list[Row], dict[str, str], list[str]]:
    """Run the cases one after another, writing the file after each, until the time is over.

    Returns:
        The rows in the file; the reasons of failed cases, by name; and the cases that were not reached.
    """
    started, found = monotonic(), [] if wanted == ROWS else read_rows(out)
    cases = [case for case in CASES if case.chosen(wanted)]
    failed: dict[str, str] = {}
    left_over: list[str] = []
    print(HEADER, flush=True)
    for position, case in enumerate(cases):
        chosen = case.chosen(wanted)
        passed = monotonic() - started
        if passed >= TOTAL_SECONDS and not quick:
            left_over += chosen
            continue
        print(f"[{position + 1}/{len(cases)}] {case.module}, after {passed:.0f} s", flush=True)
        left = TOTAL_SECONDS - passed
        seconds = case.seconds * share_of_time(cases[position:], wanted, left=left)
        rows, code = run_case(case, chosen, seconds=seconds, left=left, quick=quick, folder=out.parent)
        missing = [name for name in chosen if name not in {row.name for row in rows}]
        if code == 0 and monotonic() - started >= TOTAL_SECONDS and not quick:
            left_over += missing
            missing = []
        if code != 0 and not missing:
            print(f"bench: note: {case.module} ended with exit code {code}", file=sys.stderr)
        failed |= dict.fromkeys(missing, why_missing(case, chosen, code))
        kept = [row for row in found if row.name not in missing]
        found = merged(kept, rows, order=ROWS)
        write_rows(out, found)
    return found, failed, left_over


def share_of_time(cases: Sequence[Case], wanted: tuple[str, ...], *, left: float) -> float:
    """Return the part of their planned time that the remaining cases can have, at most 1."""
    setup = sum(case.setup_seconds for case in cases)
    planned = sum(case.planned_seconds(wanted) for case in cases) - setup
    return min(1.0, max(0.1, (left - setup) / planned))


if __name__ == "__main__":
    sys.exit(main())
