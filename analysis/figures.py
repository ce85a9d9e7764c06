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
from analysis.plans import Experiment
from analysis.rows import Results, open_results, publish
from analysis.sweep import RESULTS
from analysis.writeup import draw, is_complete, readme
from hvfreeze.page import Picture, Section, write_page

OUT = Path("build") / "experiments" / "report"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what there are results of; return 0."""
    parser = argparse.ArgumentParser(prog="python -m analysis.figures", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of all experiments' results")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where the page goes [{OUT}]")
    options = parser.parse_args(arguments)
    sections = []
    for experiment in EXPERIMENTS:
        if not is_complete(options.results / experiment.name):
            print(f"{experiment.name}: no results yet: python -m analysis.{experiment.name}")
            continue
        results = open_results(options.results, experiment.name)
        captions = draw(experiment, results)
        publish(results.directory / "README.md", readme(experiment, results, captions))
        sections.append(section(experiment, results, captions))
        print(f"{experiment.name}: {len(captions)} figures in {results.directory / 'figures'}")
    if sections:
        print(f"page: {write_page('hvfreeze: experiments', sections, out=options.out)}")
    return 0


def section(experiment: Experiment, results: Results, captions: dict[str, str]) -> Section:
    """Return an experiment's part of the page."""
    folder = results.directory / "figures"
    settings = json.loads((results.directory / "preset.json").read_text(encoding="utf-8"))
    answers = experiment.answers(results)
    return Section(
        heading=experiment.title,
        points=tuple(f"{'Negative result. ' if a.negative else ''}{a.question} {a.text}" for a in answers),
        pictures=tuple(Picture(caption=text, svg=folder / f"{name}.svg") for name, text in captions.items()),
        tables=tuple(experiment.tables(results)),
        notes=(f"Preset {settings['preset']}. " + " ".join(experiment.limits),),
    )


if __name__ == "__main__":
    sys.exit(main())
