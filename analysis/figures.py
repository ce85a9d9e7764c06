"""Draws every figure and every README.md of analysis/results/ from the rows and logs kept there, and one page of all.

python -m analysis.figures [--results DIR] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.experiments import EXPERIMENTS
from analysis.sweeps.experiment import RESULTS
from analysis.sweeps.questions import Answer, Experiment
from analysis.sweeps.results import Results, open_results
from analysis.sweeps.rows import publish
from analysis.sweeps.writeup import draw, is_complete, readme
from hvfreeze.report.page import Picture, Section, write_page

OUT = Path("build") / "experiments" / "report"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what there are results of; return 0."""
    parser = argparse.ArgumentParser(prog="python -m analysis.figures", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of all experiments' results")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where the page goes [{OUT}]")
    options = parser.parse_args(arguments)
    sections, answered = [], []
    for experiment in EXPERIMENTS:
        if not is_complete(options.results / experiment.name):
            print(f"{experiment.name}: no results yet: python -m analysis.{experiment.name}")
            continue
        results = open_results(options.results, experiment.name, experiment.reference)
        captions = draw(experiment, results)
        publish(results.directory / "README.md", readme(experiment, results, captions))
        sections.append(section(experiment, results, captions))
        answered += experiment.answers(results)
        print(f"{experiment.name}: {len(captions)} figures in {results.directory / 'figures'}")
    if sections:
        whole = [summary(answered), *sections, failures(answered, options.results / "bench" / "bench.json")]
        print(f"page: {write_page('hvfreeze: experiments', whole, out=options.out)}")
    return 0


def summary(answers: Sequence[Answer]) -> Section:
    """Return the page's first part: every question with its answer."""
    return Section(heading="Summary", points=tuple(map(line, answers)))


def failures(answers: Sequence[Answer], bench: Path) -> Section:
    """Return the page's last part: what the method did not keep, and what missed its bound in the benchmark."""
    points = [f"{answer.question} {answer.text}" for answer in answers if answer.negative]
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
    """Return an answer as a list's entry; what did not work says so first."""
    return f"{'Negative result. ' if answer.negative else ''}{answer.question} {answer.text}"


def section(experiment: Experiment, results: Results, captions: dict[str, str]) -> Section:
    """Return an experiment's part of the page."""
    folder = results.directory / "figures"
    settings = json.loads((results.directory / "preset.json").read_text(encoding="utf-8"))
    answers = experiment.answers(results)
    return Section(
        heading=experiment.title,
        points=tuple(map(line, answers)),
        pictures=tuple(Picture(caption=text, svg=folder / f"{name}.svg") for name, text in captions.items()),
        tables=tuple(experiment.tables(results)),
        notes=(f"Preset {settings['preset']}. " + " ".join(experiment.limits),),
    )


if __name__ == "__main__":
    sys.exit(main())
