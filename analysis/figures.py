"""Makes rows.csv, figures and README.md of every experiment again from the logs that are kept, and one page of all.

python -m analysis.figures                  in analysis/results/ itself; the page goes to build/experiments/report
python -m analysis.figures --out DIR        figures and page in DIR; nothing is written elsewhere
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.experiments import EVERY
from analysis.sweeps.experiment import Answer, Experiment, draw, is_complete, readme
from analysis.sweeps.kept import PRESETS, RESULTS, KeptRuns, by_name, publish, read_rows, write_rows
from analysis.sweeps.options import folder_to_write
from analysis.sweeps.results import Results, open_results
from hvfreeze.report.report import Picture, Section, write_page

OUT = Path("build") / "experiments" / "report"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what there are results of; return 0."""
    parser = argparse.ArgumentParser(prog="python -m analysis.figures", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of all experiments' results")
    parser.add_argument(
        "--out", type=folder_to_write, help=f"write here, and here only [the results; the page in {OUT}]"
    )
    options = parser.parse_args(arguments)
    sections, answered = [], []
    for experiment in EVERY:
        if not is_complete(options.results / experiment.name):
            print(f"{experiment.name}: no results yet: python -m analysis.{experiment.name}")
            continue
        if options.out is None:
            write_rows_again(options.results / experiment.name)
        results = open_results(options.results, experiment.name, experiment.reference)
        folder = results.directory if options.out is None else options.out / experiment.name
        captions = draw(experiment, results, folder)
        if options.out is None:
            publish(results.directory / "README.md", readme(experiment, results, captions))
        sections.append(section(experiment, results, captions, folder))
        answered += experiment.answers(results)
        print(f"{experiment.name}: {len(captions)} figures in {folder / 'figures'}")
    if sections:
        whole = [summary(answered), *sections, failures(answered, options.results / "bench" / "bench.json")]
        print(f"page: {write_page('hvfreeze: experiments', whole, out=options.out or OUT)}")
    return 0


def write_rows_again(directory: Path) -> None:
    """Make an experiment's CSV file again from the kept logs of the runs that it names, in the same order."""
    write_rows(directory, KeptRuns(directory).rows([str(row["run"]) for row in read_rows(directory)]))


def summary(answers: Sequence[Answer]) -> Section:
    """Return the page's first part: every question with its answer."""
    return Section(heading="Summary", points=tuple(map(line, answers)))


def failures(answers: Sequence[Answer], bench: Path) -> Section:
    """Return the page's last part: what was not kept or is not answered, and what missed its bound in the benchmark."""
    points = [f"{answer.question} {answer.text}" for answer in answers if answer.mark]
    rows = json.loads(bench.read_text(encoding="utf-8")) if bench.exists() else []
    points += [
        f"Benchmark {row['name']}: {row['what']}. The ratio is {row['ratio']:.2f} ({row['low']:.2f} to "
        f"{row['high']:.2f}, n = {row['n']}), "
        f"{'beyond' if row['low'] > row['bound'] else 'too uncertain for'} its bound {row['bound']:g}."
        for row in rows
        if not row["ok"]
    ]
    return Section(heading="What did not work", points=tuple(points) or ("Nothing in these results.",))


def line(answer: Answer) -> str:
    """Return an answer as a list's entry; what is no success says so first."""
    return f"{f'({answer.mark}) ' if answer.mark else ''}{answer.question} {answer.text}"


def section(experiment: Experiment, results: Results, captions: dict[str, str], folder: Path) -> Section:
    """Return an experiment's part of the page, whose figures lie below `folder`."""
    pictures = tuple(Picture(caption=text, svg=folder / "figures" / f"{name}.svg") for name, text in captions.items())
    settings = by_name(results.directory.parent / PRESETS)[experiment.name]
    answers = experiment.answers(results)
    return Section(
        heading=experiment.title,
        points=tuple(text for answer in answers for text in (line(answer), *answer.details)),
        pictures=pictures,
        tables=tuple(experiment.tables(results)),
        notes=(f"Preset {settings['preset']}. " + " ".join(experiment.limits),),
    )


if __name__ == "__main__":
    sys.exit(main())
