r"""The same as `analysis.peers` with a MobileNetV3, whose parameters and work are spread evenly over many small blocks.

    mpirun -n 2 hvfreeze train --model mobilenet_v3_small --data imagefolder --data-dir HALF --image-size 32 \
        --epochs 20 --lr 0.1 --schedule cosine --batch-size 64 --weight-decay 5e-4 \
        --mean 0.5071,0.4865,0.4409 --std 0.2673,0.2564,0.2762 --run-dir backbone
    python -m analysis.peers_mobilenet --preset reduced --data-dir OTHER --weights backbone/model.pt

HALF has CIFAR-10's airplanes, birds, deer, frogs and ships, OTHER its automobiles, cats, dogs, horses and trucks, each
as train/CLASS and test/CLASS, which may be links: there are no public weights of this network at 32 pixels.
"""

from __future__ import annotations

import sys

from analysis.parts.peers.limits import OWN_RATES, USUAL
from analysis.peers import Ground, at
from analysis.sweeps.experiment import main

PEERS = ("full", "auto", "auto-one-view")
COUNTS = (5_000,)

GROUND = Ground(
    flags={"model": "mobilenet_v3_small", "data": "imagefolder", "data_dir": "OTHER", "reset_head": True},
    counts=COUNTS,
    peers=PEERS,
)
OWN = (
    "Full fine-tuning gains with every epoch here, and the highest rate served long budgets best: more may help.",
    "The network has learnt from 25 000 images of five other classes only: what it has to give is little.",
    "Training time is the clock's, of runs one after another beside other jobs: an idle machine is faster.",
    "CIFAR-10 on both sides: related images, a related task.",
)
EXPERIMENT = at("peers_mobilenet", GROUND, limits=(*OWN_RATES[:1], *OWN, *USUAL))

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
