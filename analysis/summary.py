"""Writes what README.md says in numbers, between its markers, from analysis/results/; `--check` only compares.

python -m analysis.summary [--check] [--readme FILE] [--results DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.experiments import EVERY
from analysis.parts.readme import NOTHING_YET, PARTS
from analysis.sweeps.experiment import RESULTS
from analysis.sweeps.results import open_results
from analysis.sweeps.rows import collect, publish, read_rows
from analysis.sweeps.writeup import is_complete
from hvfreeze.errors import HvfreezeError, RefusedError
from hvfreeze.report.csv_files import to_csv

README = Path(__file__).resolve().parents[1] / "README.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare the parts; return 0 when README agrees with the results, 3 when not."""
    parser = argparse.ArgumentParser(prog="python -m analysis.summary", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where README and results disagree")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        text = options.readme.read_text(encoding="utf-8")
        check_rows(options.results)
        wanted = text
        for name, part in (("results", table), *PARTS.items()):
            wanted = with_part(wanted, name, part(options.results))
        if options.check and wanted != text:
            raise RefusedError(f"{options.readme} does not show what the results say: run python -m analysis.summary")
    except HvfreezeError as error:
        print(f"summary: error: {error}", file=sys.stderr)
        return error.exit_code
    if wanted != text:
        publish(options.readme, wanted)
    return 0


def check_rows(root: Path) -> None:
    """Compare every CSV file with the logs that it was made from.

    Raises:
        RefusedError: they disagree; names the file.
    """
    for experiment in EVERY:
        directory = root / experiment.name
        if is_complete(directory):
            held = (directory / "rows.csv").read_text(encoding="utf-8")
            names = [str(row["run"]) for row in read_rows(directory)]
            if held != to_csv(collect(directory, names)):
                raise RefusedError(f"{directory / 'rows.csv'} is not what the logs in runs/ say")


def table(root: Path) -> str:
    """Return the table of all answers in Markdown."""
    lines = ["| question | answer | n |", "|:---|:---|---:|"]
    for experiment in EVERY:
        if not is_complete(root / experiment.name):
            continue
        for answer in experiment.answers(open_results(root, experiment.name, experiment.reference)):
            link = f"[{answer.question}](analysis/results/{experiment.name}/README.md)"
            mark = f"**({answer.mark})** " if answer.mark else ""
            lines.append(f"| {link} | {mark}{answer.text} | {answer.n} |")
    return "\n".join(lines if len(lines) > 2 else [NOTHING_YET])


def with_part(text: str, name: str, part: str) -> str:
    """Return a README's text with a part between its markers.

    Raises:
        RefusedError: the markers are not there, once each and in order.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed or begin in after:
        raise RefusedError(f"README.md must hold the lines {begin} and {end}, once and in this order")
    return f"{before}{begin}\n{part}\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
