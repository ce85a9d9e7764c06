"""A training script with the mistake that its first argument names."""

from __future__ import annotations

import os
import sys

import horovod.torch as hvd
import torch
from torch import nn

import hvfreeze


class Own(nn.Module):
    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).relu())
        return y


def main(mistake: str, start: str) -> None:
    if start == "running":
        hvd.init()
    torch.manual_seed(0)
    odd = mistake == "other layers on one rank" and os.environ.get("OMPI_COMM_WORLD_RANK") == "1"
    model = Own(3 if odd else 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvfreeze.DistributedOptimizer(optimizer, model=model)
    for step in range(4):
        if mistake == "one rank fails" and hvd.rank() == 1 and step == 2:
            raise KeyError("nobody expected this")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
