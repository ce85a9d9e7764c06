"""The image script, one rank on each node, with a cache that all nodes see and with one of each node's own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hvfreeze.imports import kept_for_good

with kept_for_good():
    import torch

    from hvfreeze.comm.replica_sync import check_replicas
    from tests.parallel.workers.own_scripts import run_image


def main() -> None:
    torch.set_num_threads(1)
    shared, found = Path(sys.argv[1]), {}
    places = {"shared": shared / "activations", "own": Path(os.environ["TMPDIR"]) / "activations"}
    for name, directory in places.items():
        model, optimizer, _ = run_image(directory)
        optimizer.freezer.average_statistics()
        digest = check_replicas(model, optimizer.world, step=optimizer.freezer.step)
        files = sorted(path.name.rpartition("-")[2] for path in directory.glob("*.h5"))
        found[name] = {"digest": digest, "files": sorted(set(files))}
    world: Any = optimizer.world
    everyone = world.allgather_object({"host": os.uname().nodename, **found}, name="found")
    if world.rank == 0:
        (shared / "found.json").write_text(json.dumps(everyone))


if __name__ == "__main__":
    main()
