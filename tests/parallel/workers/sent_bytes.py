"""Allreduces of a known size, and what this node's interface sent for them beside what it sends when idle."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

PAYLOAD_BYTES = 8 << 20
REPEATS = 5


def sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


hvd.init()
tensor = torch.ones(PAYLOAD_BYTES // 4)
hvd.allreduce(tensor, name="payload")
before, start = sent(), time.monotonic()
time.sleep(1.0)
idle_rate = (sent() - before) / (time.monotonic() - start)
hvd.allreduce(torch.ones(1), name="together")
before, start = sent(), time.monotonic()
for _ in range(REPEATS):
    hvd.allreduce(tensor, name="payload")
counted = sent() - before - idle_rate * (time.monotonic() - start)
found = hvd.allgather_object(counted / (PAYLOAD_BYTES * REPEATS))
if hvd.rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(found))
hvd.shutdown()
