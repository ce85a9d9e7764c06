"""A script of one's own with the mistake that its first argument names."""

from __future__ import annotations

import os
import sys

import horovod.torch as hvd
import torch
from torch import nn

import hvfreeze


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).relu())
        return y


def main(mistake: str, start: str) -> None:
    if start == "running":
        hvd.init()
    torch.manual_seed(0)
    model = Own()
    example = None if mistake == "no example" else torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvfreeze.DistributedOptimizer(optimizer, model=model, example=example, steps_per_epoch=2, num_epochs=2)
    if mistake == "an unequal start" and hvd.rank() == 1:
        nn.init.zeros_(model.first.weight)
    for step in range(4):
        if mistake == "one rank fails" and hvd.rank() == 1 and step == 2:
            raise KeyError("nobody expected this")
        model(torch.ones(2, 4)).sum().backward()
        if mistake == "clipped too early":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    if mistake == "none":
        os.write(1, f"rank {hvd.rank()} is done\n".encode())  # at once, or the ranks' lines mix


if __name__ == "__main__":
    main(*sys.argv[1:])
