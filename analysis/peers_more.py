"""The same as `analysis.peers` with 20,000 samples.

python -m analysis.peers_more --preset reduced --data-dir DIR --weights FILE
"""

import sys

from analysis.peers import EXPERIMENTS
from analysis.sweeps.sweep import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENTS["peers_more"]))
