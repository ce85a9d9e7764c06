"""Exchanges of gradients with each compression, and what this node's interface sent for them beside idle traffic."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from hvfreeze.imports import kept_for_good

with kept_for_good():
    import torch
    from torch import nn

    from hvfreeze.comm.horovod_world import open_world
    from hvfreeze.comm.reducer import Reducer
    from hvfreeze.comm.world import World
    from tests.messages import messages_of

COMPRESSIONS = ("none", "fp16", "powersgd:8")
STEPS = 4


def sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def settled(world: World) -> tuple[int, float]:
    """Return bytes and time at a moment when every rank has ended what it did."""
    world.barrier(name="together")
    time.sleep(0.3)
    world.barrier(name="again")
    return sent(), time.monotonic()


def step(reducer: Reducer, named: list[tuple[str, nn.Parameter]]) -> None:
    reducer.begin()
    sum(p.sum() for _, p in named).backward()  # type: ignore[union-attr]
    reducer.finish()


def counted(world: World, compression: str, idle_rate: float) -> dict[str, float]:
    """Return bytes a step: by the formula, handed over, and on the wire."""
    named = [(f"p{i}", nn.Parameter(torch.zeros(1024, 1024))) for i in range(3)] + [
        ("bias", nn.Parameter(torch.zeros(9)))
    ]
    reducer = Reducer(world, compression=compression, uncompressed_steps=0)
    reducer.carry(named)
    step(reducer, named)
    first = reducer.payload_bytes
    before, start = settled(world)
    for _ in range(STEPS):
        step(reducer, named)
    after, end = settled(world)
    wire = (after - before - idle_rate * (end - start)) / STEPS
    messages = messages_of(named, compression=compression, size=world.size, bucket_bytes=reducer.bucket_bytes)
    formula = sum(map(sum, messages))
    return {"formula": formula, "handed": (reducer.payload_bytes - first) / STEPS, "wire": wire}


def main() -> None:
    torch.set_num_threads(1)
    world = open_world()
    before, start = settled(world)
    time.sleep(1.0)
    after, end = settled(world)
    idle_rate = (after - before) / (end - start)
    found = {compression: counted(world, compression, idle_rate) for compression in COMPRESSIONS}
    everybody = world.allgather_object(found, name="found")
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(everybody))
    world.close()


if __name__ == "__main__":
    main()
