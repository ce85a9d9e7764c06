"""Allreduces of a known size, and what this node's interface sent for them beside what it sends when idle."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from hvfreeze.comm.mpi_environment import tune_open_mpi

PAYLOAD_BYTES = 8 << 20
REPEATS = 5


def sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def settled() -> tuple[int, float]:
    """Bytes and time at a moment when every rank has ended what it did, and the interfaces have sent what they got."""
    hvd.allreduce(torch.ones(1), name="together")
    time.sleep(0.3)
    hvd.allreduce(torch.ones(1), name="again")
    return sent(), time.monotonic()


tune_open_mpi()
hvd.init()
tensor = torch.ones(PAYLOAD_BYTES // 4)
hvd.allreduce(tensor, name="payload")
before, start = settled()
time.sleep(1.0)
after, end = settled()
idle_rate = (after - before) / (end - start)
for _ in range(REPEATS):
    hvd.allreduce(tensor, name="payload")
before, start = after, end
after, end = settled()
counted = after - before - idle_rate * (end - start)
found = hvd.allgather_object(counted / (PAYLOAD_BYTES * REPEATS), name="found")
if hvd.rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(found))
hvd.shutdown()
