"""Horovod's own optimizer on the same work, as people use it; the flags of `hvfreeze train`. See `analysis.ddp`.

    mpirun -n 2 python -m analysis.parts.plain_horovod train --data digits --run-dir DIR

Images are channels_last; weights are not, because Horovod refuses their gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import horovod.torch as hvd
import torch
from torch import nn

from analysis import ddp

PROGRAM = "Horovod's DistributedOptimizer"


def with_horovod(model: nn.Module, optimizer: ddp.Optimizer) -> tuple[nn.Module, ddp.Optimizer]:
    """Return the model as it is, and Horovod's optimizer around the given one."""
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=named)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and return the exit code."""
    hvd.init()
    return ddp.main(arguments, wrap=with_horovod, program=PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
