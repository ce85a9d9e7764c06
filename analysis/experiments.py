"""The study's questions, in the order in which they are to be run: the baseline's learning rate and front serve all.

python -m analysis.experiments --preset reduced --data-dir DIR --weights FILE     all of them, one after another
python -m analysis.experiments --estimate                                        how long each takes

FILE was trained at 32 pixels. `analysis.pixels64`, which begins with weights of 64 pixels, is a separate command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from analysis import (
    adaptive,
    baseline,
    cache_benefit,
    caching,
    communication,
    cores,
    peers,
    photographs,
    pixels64,
    script_heads,
    static_sweep,
    strategies,
    tasks,
    votes,
)
from analysis.sweeps.sweep import main as main_of

EXPERIMENTS = tuple(module.EXPERIMENT for module in (baseline, static_sweep, adaptive, caching, communication))
"""Experiments with the same initial weights, or with none."""
OTHERS = (pixels64, tasks, script_heads, cache_benefit, cores, strategies)
EVERY = (*EXPERIMENTS, *peers.EXPERIMENTS.values(), *(module.EXPERIMENT for module in OTHERS))
"""All that are runs of the program."""
PAGES = {page.name: page for page in (*(each.page for each in EVERY), votes.PAGE, photographs.PAGE)}
"""All pages of results, by name."""
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all experiments with the same arguments; return the worst exit code, at once where one was interrupted."""
    worst = 0
    for experiment in EXPERIMENTS:
        code = main_of(experiment, arguments, one_of="experiments")
        if code == INTERRUPTED:
            return code
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
