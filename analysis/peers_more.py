"""The same as `analysis.peers` with 20 000 samples.

python -m analysis.peers_more --preset reduced --data-dir DIR --weights FILE
"""

from __future__ import annotations

import sys

from analysis.parts.peers.limits import TAKEN_RATES, TIMED, USUAL
from analysis.peers import MORE, Ground, at
from analysis.peers64 import PEERS
from analysis.sweeps.experiment import main

GROUND = Ground(counts=MORE, peers=PEERS, rates_of="peers")
OWN = ("Of the ways that are planned full fine-tuning and auto were made.",)
EXPERIMENT = at("peers_more", GROUND, limits=(*TAKEN_RATES, *OWN, *TIMED, *USUAL))

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
