"""The study's questions, in the order in which they are to be run: the baseline's learning rate and front serve all.

python -m analysis.experiments --preset reduced --data-dir DIR --weights FILE     all of them, one after another
python -m analysis.experiments --estimate                                        how long each takes

FILE was trained at 32 pixels. `analysis.pixels64`, which begins with weights of 64 pixels, is a command of its own.
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
    compression,
    cores,
    criteria,
    exact_head,
    grounds,
    own_scripts,
    peers,
    pixels64,
    static_sweep,
    strategies,
    votes,
)
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Page
from analysis.sweeps.sweep import main as main_of

EXPERIMENTS = tuple(module.EXPERIMENT for module in (baseline, static_sweep, adaptive, caching, communication))
"""Those that begin with the same weights, or with none."""
GROUPS: dict[str, tuple[Experiment | Page, ...]] = {
    "Full fine-tuning, and the study's questions": tuple(
        module.EXPERIMENT for module in (baseline, static_sweep, adaptive, pixels64)
    ),
    "`--freeze auto` and solved heads": (
        *peers.EXPERIMENTS.values(),
        *(module.EXPERIMENT for module in (grounds, exact_head)),
    ),
    "Votes and criteria": (votes.PAGE, criteria.EXPERIMENT, own_scripts.EXPERIMENT),
    "The cache": (caching.EXPERIMENT, cache_benefit.EXPERIMENT),
    "Cores and networks": tuple(module.EXPERIMENT for module in (cores, communication, compression)),
    "Strategies": (strategies.EXPERIMENT,),
}
"""All experiments by what a reader looks for; those that are not in `EXPERIMENTS` are commands of their own."""
EVERY = tuple(each for group in GROUPS.values() for each in group if isinstance(each, Experiment))
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
