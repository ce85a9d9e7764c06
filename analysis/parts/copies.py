"""Independent trainings, one per rank of mpirun, each on its own core: python -m analysis.parts.copies train FLAGS...

Their loss against a single one comes from shared caches, memory and clock of the processor, without MPI. Copy 0
leaves its run directory as any run does, with `copies` in its summary.json: the images per second of each one's epochs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from analysis.parts.pinned import pin_or_exit
from hvfreeze.__main__ import main
from hvfreeze.comm.mpi_environment import claimed_rank, claimed_tasks

OF_THE_JOB = ("OMPI_", "PMIX_", "PRTE_")
"""How variables begin by which a process knows the others."""
LOOK_SECONDS = 0.2


def train(words: Sequence[str]) -> int:
    """Train as one of the copies; return the exit code."""
    copy, count = claimed_rank(os.environ), claimed_tasks(os.environ)[0]
    pin_or_exit(copy)
    for name in [name for name in os.environ if name.startswith(OF_THE_JOB)]:
        del os.environ[name]
    place = words.index("--run-dir") + 1
    own = [Path(words[place]), *(Path(words[place], f"copy{number}") for number in range(1, count))]
    # A folder that holds a run is refused as a new run directory, so copy 0 begins first.
    while copy > 0 and not (own[0] / "config.yaml").exists():
        time.sleep(LOOK_SECONDS)
    code = main([*words[:place], str(own[copy]), *words[place + 1 :]])
    if code == 0 and copy == 0:
        # mpirun ends all of them when one fails.
        while not all((folder / "summary.json").exists() for folder in own):
            time.sleep(LOOK_SECONDS)
        gather(own)
    return code


def gather(folders: Sequence[Path]) -> None:
    """Write what all copies have come to into the first one's summary, and remove the others."""
    logs = [(folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines() for folder in folders]
    summary = json.loads((folders[0] / "summary.json").read_text(encoding="utf-8"))
    summary["copies"] = [[json.loads(line)["images_per_second"] for line in lines] for lines in logs]
    (folders[0] / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    for folder in folders[1:]:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
