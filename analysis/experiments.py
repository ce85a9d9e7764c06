"""All experiments, in the order in which they are to be run: the baseline's learning rate and front serve the others.

python -m analysis.experiments --preset reduced --data-dir DIR --weights FILE     all of them, one after another
python -m analysis.experiments --estimate                                        how long each takes
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from analysis import (
    adaptive,
    auto_parts,
    baseline,
    cache_benefit,
    caching,
    communication,
    compression,
    criteria,
    exact_head,
    grounds,
    peers,
    pixels64,
    scaling,
    static_sweep,
    strategies,
    votes,
)
from analysis.sweeps.sweep import main as main_of

EXPERIMENTS = tuple(
    module.EXPERIMENT for module in (baseline, static_sweep, adaptive, votes, caching, communication, scaling, pixels64)
)
LONGER = (
    *(
        module.EXPERIMENT
        for module in (cache_benefit, exact_head, compression, auto_parts, grounds, criteria, strategies)
    ),
    *peers.EXPERIMENTS.values(),
)
"""What the cache saves of whole commands, what heads that are solved give, what a compressed exchange and a chain on
several ranks cost, and what else a user could do: each a command of its own, and peers take hours."""
EVERY = (*EXPERIMENTS, *LONGER)
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all experiments with the same arguments; return the worst exit code, at once where one was interrupted."""
    worst = 0
    for experiment in EXPERIMENTS:
        code = main_of(experiment, arguments)
        if code == INTERRUPTED:
            return code
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
