"""Every rank adds its number; one may be told to misbehave, to see that the helper notices."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import horovod.torch as hvd
import torch

from tests.parallel.mpirun import report

hvd.init()
rank, size = hvd.rank(), hvd.size()
total = hvd.allreduce(torch.tensor([rank + 1], dtype=torch.int64), op=hvd.Sum, name="numbers")
mode = sys.argv[1] if len(sys.argv) > 1 else "report"
if mode == "hang" and rank == size - 1:
    time.sleep(3600)
if mode == "orphan" and rank == 0:
    subprocess.Popen(["sleep", "3600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
if not (mode == "silent" and rank == size - 1):
    report(rank, size=size, local_size=hvd.local_size(), total=int(total), variables=sorted(os.environ))
hvd.allreduce(torch.zeros(1), name="end")
hvd.shutdown()
