"""The same as `analysis.peers` with 20 000 samples.

python -m analysis.peers_more --preset reduced --data-dir DIR --weights FILE
"""

from __future__ import annotations

import sys

from analysis.peers import MORE, at
from analysis.sweeps.experiment import main

EXPERIMENT = at("peers_more", counts=MORE)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
