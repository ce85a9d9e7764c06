"""A small chain with everything that trains it, as a loop of one's own would put it together."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hvfreeze.chain.blocks import Chain
from hvfreeze.config.sections import FreezeConfig
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.ranks.equal_models import parameter_digest
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.ranks.world import World


def block(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU())


class Parts:
    """A small chain with everything that trains it; data differ between ranks, parameters do not."""

    def __init__(self, world: World, *, compression: str = "none", **settings: object) -> None:
        torch.manual_seed(0)
        body = [block(3, 8), block(8, 8), block(8, 12), nn.Sequential(nn.Flatten(), nn.Linear(12 * 36, 5))]
        self.model = nn.Sequential(*body)
        self.chain = Chain.from_modules(self.model, [(f"block{i}", part) for i, part in enumerate(body)])
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.world = world
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
        self.reducer = Reducer(world, compression=compression, bucket_bytes=2000, piece_bytes=600)
        self.freezer = Freezer(
            self.chain,
            optimizer=self.optimizer,
            reducer=self.reducer,
            world=world,
            settings=FreezeConfig(**settings),  # type: ignore[arg-type]
            cadence=Cadence(interval=2, warmup=4, steps_per_epoch=4, num_epochs=100),
        )
        self.random = torch.Generator().manual_seed(world.rank)

    def step(self, *, poison: bool = False) -> object:
        self.model.train()
        images = torch.randn(6, 3, 6, 6, generator=self.random)
        labels = torch.randint(0, 5, (6,), generator=self.random)
        loss = nn.functional.cross_entropy(self.chain(images), labels)
        if poison:
            loss = loss * math.nan
        self.reducer.begin()
        self.reducer.signal(nonfinite=not math.isfinite(loss.item()))
        loss.backward()
        self.signals = self.reducer.finish()
        if self.signals.nonfinite:
            return None
        self.optimizer.step()
        decision = self.freezer.after_step(loss.item())
        digests = self.world.allgather_object(digest(self.chain.named_parameters()), name="test.parameters")
        assert len(set(digests)) == 1, "parameters differ between ranks"
        assert len(set(self.world.allgather_object(self.freezer.cut, name="test.cut"))) == 1
        return decision


def digest(named: list[tuple[str, nn.Parameter]] | list[tuple[str, Tensor]]) -> str:
    return parameter_digest(
        nn.ParameterDict({n.replace(".", "_"): nn.Parameter(t.detach().double()) for n, t in named})
    )
