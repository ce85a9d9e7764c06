"""Writes the numbers of README.md and of docs/, between their markers, from analysis/results/; `--check` only compares.

python -m analysis.summary [--check] [--readme FILE] [--results DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis import grounds
from analysis.experiments import EVERY, GROUPS
from analysis.parts.readme import NOTHING_YET, PARTS
from analysis.sweeps.experiment import is_complete
from analysis.sweeps.kept import RESULTS, KeptRuns, publish, read_rows
from analysis.sweeps.pages import Page, claims
from analysis.sweeps.results import open_results
from hvfreeze.errors import HvfreezeError, RefusedError
from hvfreeze.report.tables import to_csv
from hvfreeze.wording import plural

README = Path(__file__).resolve().parents[1] / "README.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare the parts; return 0 when the pages agree with the results, 3 when not."""
    parser = argparse.ArgumentParser(prog="python -m analysis.summary", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where pages and results disagree")
    parser.add_argument("--readme", type=Path, default=README, help="pages are this file and docs/ beside it")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        check_rows(options.results)
        found = pages(options.readme)
        wanted = dict(found)
        for name, part in {**OF_EXPERIMENTS, **PARTS}.items():
            page = page_of(name, found)
            up = "../" * (len(page.relative_to(options.readme.parent).parts) - 1)
            text = part(options.results).replace("](analysis/", f"]({up}analysis/")
            wanted[page] = with_part(wanted[page], name, text)
        changed = [page for page in found if wanted[page] != found[page]]
        if options.check and changed:
            listed = ", ".join(map(str, changed))
            raise RefusedError(f"{listed}: not what the results say; run python -m analysis.summary")
    except HvfreezeError as error:
        print(f"summary: error: {error}", file=sys.stderr)
        return error.exit_code
    for page in changed:
        publish(page, wanted[page])
    return 0


def pages(readme: Path) -> dict[Path, str]:
    """Return README's text and that of every page below docs/ beside it."""
    paths = [readme, *sorted((readme.parent / "docs").rglob("*.md"))]
    return {path: path.read_text(encoding="utf-8") for path in paths if path.exists()}


def page_of(name: str, pages: dict[Path, str]) -> Path:
    """Return the one page that holds a part's markers.

    Raises:
        RefusedError: they are on no page, on several, or more than once.
    """
    holding = [page for page, text in pages.items() for _ in range(text.count(f"<!-- {name} -->"))]
    if len(holding) != 1:
        where = ", ".join(map(str, holding)) or "none"
        raise RefusedError(f"<!-- {name} --> must stand once in README.md and the pages of docs/; found in: {where}")
    return holding[0]


def check_rows(root: Path) -> None:
    """Compare every CSV file with the logs that it was made from.

    Raises:
        RefusedError: they disagree; names the file.
    """
    for experiment in EVERY:
        directory = root / experiment.name
        if is_complete(directory):
            held, runs = (directory / "rows.csv").read_text(encoding="utf-8"), KeptRuns(directory)
            names = [str(row["run"]) for row in read_rows(directory)]
            if held != to_csv(runs.rows(names)):
                raise RefusedError(f"{directory / 'rows.csv'} is not what runs.jsonl says")
            if missing := sorted(runs.lines.keys() - set(names)):
                raise RefusedError(
                    f"{directory / 'rows.csv'} lacks {plural(len(missing), 'run')} of runs.jsonl, such as "
                    f"{missing[0]}; run python -m analysis.{experiment.name} again with the arguments that made them"
                )


def table(root: Path) -> str:
    """Return a table of answers for each group of experiments, in Markdown."""
    parts = []
    for heading, experiments in GROUPS.items():
        rows = []
        for each in experiments:
            link = f"analysis/results/{each.name}/README.md"
            if isinstance(each, Page):
                found = claims(each.text(root)) if (root / each.name).exists() else ()
                rows += [f"| [{question}]({link}) | {mark}{text} | |" for mark, question, text in found]
            elif is_complete(root / each.name):
                rows += [
                    f"| [{answer.question}]({link}) | {f'**({answer.mark})** ' if answer.mark else ''}{answer.text} "
                    f"| {answer.n} |"
                    for answer in each.answers(open_results(root, each.name, each.reference))
                ]
        if rows:
            parts.append("\n".join([f"### {heading}\n", "| question | answer | n |", "|:---|:---|---:|", *rows]))
    return "\n\n".join(parts) or NOTHING_YET


def tasks(root: Path) -> str:
    """Return `--freeze auto` by itself beside the best full fine-tuning on every task, in Markdown."""
    return grounds.in_short(open_results(root, "grounds")) or NOTHING_YET


OF_EXPERIMENTS: dict[str, Callable[[Path], str]] = {"results": table, "tasks": tasks}
"""The parts that experiments themselves make."""


def with_part(text: str, name: str, part: str) -> str:
    """Return a page's text with a part between its markers.

    Raises:
        RefusedError: the second marker does not follow the first.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not closed:
        raise RefusedError(f"{begin} must be followed by {end}")
    return f"{before}{begin}\n{part}\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
