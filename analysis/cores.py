"""What do more cores of one machine give, a rank on each? Strong and weak scaling, and copies without MPI beside them.

    python -m analysis.cores --data-dir DIR --weights FILE --results build/cores    on all cores of this machine
    python -m analysis.cores ... --seeds 0 --ranks 8                                once instead of three times, on 8

Strong: the same images and the same batch of all ranks, in full, with blocks frozen by a schedule, and a head solved.
Weak: as many images and as large a batch for each rank. DIR is a folder of images, {train,test}/CLASS/*; FILE a
ResNet-18 trained at 32 pixels. Each rank has one thread and a core of its own. An idle machine, please.
"""

from __future__ import annotations

import os
import sys

from analysis.parts.core_pages import answers, drawings, tables
from analysis.parts.pinned import cores
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.sweep import main

GLOBAL_BATCH, STRONG_IMAGES = 384, 2_304
RANK_BATCH, RANK_IMAGES = 64, 384
SMALL_BATCH, SMALL_IMAGES, SMALL_RANKS = 16, 64, 2
"""Of the smoke preset on any machine; batch and images of all ranks, and of each."""
FEW, MANY = 5_000, 20_000
"""Images that a head is solved on."""


def runs(preset: Preset) -> list[PlannedRun]:
    """Return every way on 1, 2, 4, ... ranks, the most first, since a short time is best spent on them."""
    most = SMALL_RANKS if preset.is_smoke else preset.ranks
    sizes = sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power < most)}, reverse=True)
    asked = {"full": sizes, "weak": sizes, "copies": sizes[:1]}
    if not preset.is_smoke:
        asked |= {"solved-few": sizes, "frozen": sizes, "solved-many": sizes[:2]}
    return [
        PlannedRun(
            label=f"{way}-{ranks}x",
            seed=seed,
            flags=flags(preset, way, ranks),
            ranks=ranks,
            program=f"analysis.parts.{'copies' if way == 'copies' else 'pinned'}",
        )
        for seed in preset.seeds
        for way, chosen in asked.items()
        for ranks in chosen
    ]


def flags(preset: Preset, way: str, ranks: int) -> dict[str, Value]:
    """Return the flags of a way on so many ranks."""
    known = preset.common()
    found: dict[str, Value] = {
        name: known[name] for name in ("data", "model", "image_size", "weights") if name in known
    }
    found |= {"mirror": "off", "augment": "none", "cache": "off", "checkpoint_every": "0"}
    if not preset.is_smoke:
        found |= {"data": "imagefolder", "data_dir": "./"}
    if way.startswith("solved"):
        return {**found, "freeze": "auto", "epochs": 1, "train_samples": FEW if way == "solved-few" else MANY}
    strong = (SMALL_BATCH, SMALL_IMAGES) if preset.is_smoke else (GLOBAL_BATCH, STRONG_IMAGES)
    each = (SMALL_BATCH, SMALL_IMAGES) if preset.is_smoke else (RANK_BATCH, RANK_IMAGES)
    batch, images = (strong[0] // ranks, strong[1]) if way in ("full", "frozen") else each
    epochs = 4 if way == "frozen" else 3
    found |= {"lr": 0.05, "schedule": "cosine", "epochs": epochs, "evaluate_every": epochs, "batch_size": batch}
    found |= {"train_samples": images * (ranks if way == "weak" else 1)}
    return {**found, "freeze": "linear", "cache": "on"} if way == "frozen" else found


EXPERIMENT = Experiment(
    name="cores",
    title="More cores of one machine, a rank on each",
    runs=runs,
    answers=answers,
    tables=tables,
    drawings=drawings,
    limits=(
        "A run a cell, but for one that has two: differences of a tenth say nothing.",
        "Six steps an epoch, and two or three epochs that count: those of one run differ by more than a tenth.",
        "A solver's exchange is part of its time.",
        "Blocks frozen by a schedule on one rank, and 20 000 images on fewer ranks than all, were not measured.",
        "The kept runs were made by an earlier form of this command, with the same flags and taskset to bind ranks.",
        "Their environment had OMPI_MCA_pml=ob1, OMPI_MCA_btl=self,sm, OMPI_MCA_coll=^han; 500 images were tested on.",
        "Their Open MPI is 5.0.11, their torch one for GPUs (2.11.0+cu130) that saw none.",
        "A virtual machine of 16 cores without second threads; what else ran on its host is not known.",
        "ResNet-18 at 32 pixels is a small model: larger images give a rank more to compute between two exchanges.",
    ),
    chooses_lr=True,
    one_factor=False,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, ["--ranks", str(len(cores(os.sched_getaffinity(0)))), *sys.argv[1:]]))
