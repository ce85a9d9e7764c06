"""The same as `analysis.peers` with images twice as large, from weights trained at that size.

python -m analysis.peers64 --preset reduced --data-dir DIR --weights FILE
"""

from __future__ import annotations

import sys

from analysis.peers import FEWER, MORE, at
from analysis.sweeps.experiment import main

EXPERIMENT = at("peers64", larger=2, counts=(*FEWER, *MORE))

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
