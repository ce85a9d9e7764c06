"""The same as `analysis.peers` with images twice as large, from weights trained at that size.

python -m analysis.peers64 --preset reduced --data-dir DIR --weights FILE
"""

import sys

from analysis.peers import EXPERIMENTS
from analysis.sweeps.sweep import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENTS["peers64"]))
