"""Steps of a stale ring with a narrow model, and what this node's interface sent for them beside idle traffic."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import hvfreeze.model.tiny_lm as tiny_lm
from hvfreeze.comm.horovod_world import open_world
from hvfreeze.config.tree import from_dict
from hvfreeze.strategies.stale_ring.strategy import LANES, StaleRing
from hvfreeze.training.build import prepare
from tests.parallel.workers.sent_gradients import settled

WIDTH, CONTEXT, BATCH, STEPS, WARM_UP = 8, 64, 256, 6, 4
LABELS = 8 * BATCH * CONTEXT
"""Bytes of a batch's labels, a quarter of an activation's: they would be seen."""


def main() -> None:
    torch.set_num_threads(1)
    tiny_lm.WIDTH, tiny_lm.HEADS = WIDTH, 1
    world = open_world()
    before, start = settled(world)
    time.sleep(1.0)
    after, end = settled(world)
    idle_rate = (after - before) / (end - start)
    folder = Path(sys.argv[1]).parent
    settings = {"strategy": "stale-ring", "batch_size": BATCH, "context": CONTEXT, "stale_after": 0, "threads": 1}
    job = prepare(from_dict({**settings, "run_dir": str(folder / "ring")}), world)
    ring = job.strategy
    assert isinstance(ring, StaleRing)
    batches = job.feed.epoch(0)
    ring.begin_epoch(batches)
    for batch in batches[:WARM_UP]:
        ring.step([batch], rate=1e-3, leave=False)
    handed = sum(ring.wire.counts[lane].bytes_sent for lane in LANES)
    before, start = settled(world)
    for batch in batches[WARM_UP : WARM_UP + STEPS]:
        ring.step([batch], rate=1e-3, leave=False)
    after, end = settled(world)
    found = {
        "wire": (after - before - idle_rate * (end - start)) / STEPS,
        "handed": (sum(ring.wire.counts[lane].bytes_sent for lane in LANES) - handed) / STEPS,
        "boundary": 4 * BATCH * CONTEXT * WIDTH,
        "labels": LABELS,
    }
    everybody = world.allgather_object(found, name="found")
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(everybody))
    world.close()


if __name__ == "__main__":
    main()
