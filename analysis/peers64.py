"""The same as `analysis.peers` with images twice as large, from weights trained at that size.

python -m analysis.peers64 --preset reduced --data-dir DIR --weights FILE
"""

from __future__ import annotations

import sys

from analysis.parts.peers.limits import TAKEN_RATES, TIMED, USUAL
from analysis.peers import Ground, at
from analysis.sweeps.experiment import main

PEERS = ("full", "last-stage-cached", "exact", "auto", "auto-one-view")
"""Ours, what they are held against, and at 32 pixels the strongest of the others that store rows."""
OTHERS = ("head-cached", "lp-ft", "voted", "autofreeze", "pipetransformer", "composer")

GROUND = Ground(larger=2, peers=(*PEERS, *OTHERS), rates_of="peers")
OWN = ("Of the other ways the cached last stage, the head, and the head tuned before all were made, on one seed.",)
EXPERIMENT = at("peers64", GROUND, limits=(*TAKEN_RATES, *OWN, *TIMED, *USUAL))

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
