"""The same as `analysis.peers` with images twice as large, from weights trained at that size.

python -m analysis.peers64 --preset reduced --data-dir DIR --weights FILE
"""

from __future__ import annotations

import sys

from analysis.peers import at
from analysis.sweeps.experiment import main

EXPERIMENT = at("peers64", 2)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
