r"""The same as `analysis.peers` with a MobileNetV3, whose parameters and work are spread evenly over many small blocks.

    mpirun -n 2 hvfreeze train --model mobilenet_v3_small --data imagefolder --data-dir HALF --image-size 32 \
        --epochs 20 --lr 0.1 --schedule cosine --batch-size 64 --weight-decay 5e-4 \
        --mean 0.5071,0.4865,0.4409 --std 0.2673,0.2564,0.2762 --run-dir backbone
    python -m analysis.peers_mobilenet --preset reduced --data-dir OTHER --weights backbone/model.pt

HALF has CIFAR-10's airplanes, birds, deer, frogs and ships, OTHER its automobiles, cats, dogs, horses and trucks, each
as train/CLASS and test/CLASS, which may be links: there are no public weights of this network at 32 pixels.
"""

import sys

from analysis.peers import EXPERIMENTS
from analysis.sweeps.sweep import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENTS["peers_mobilenet"]))
