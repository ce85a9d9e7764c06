"""A model of several inputs in a script of one's own: checks that `own_optimizer` runs with its own."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.config.sections import FreezeConfig
from hvfreeze.own_loop.optimizer import DistributedOptimizer
from hvfreeze.ranks.equal_models import check_replicas
from hvfreeze.ranks.world import World
from tests.parallel.workers.wrapped import wrap


class Text(nn.Module):
    """Two inputs, a loose parameter, shared dropout, glue between its parts: no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.embedding = nn.Embedding(20, 8)
        self.position = nn.Parameter(torch.zeros(1, 6, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) + self.position)
        for layer in self.layers:
            x = x + self.dropout(layer(x).relu())
        logits: Tensor = self.head((x * mask[..., None]).mean(1))
        return logits


def text_training(world: World, **settings: Any) -> tuple[Text, DistributedOptimizer, Callable[[int], None]]:
    torch.manual_seed(0)
    model = Text()
    example = {"tokens": torch.zeros(2, 6, dtype=torch.int64), "mask": torch.ones(2, 6)}
    options = {"interval": 2, "freeze_warmup": 4, "eta_max": math.inf, **settings}
    config = FreezeConfig(freeze="gradient-norm", **options)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = wrap(model, adamw, world, settings=config, num_epochs=20, example=example)
    generator = torch.Generator()

    def train(steps: int) -> None:
        for _ in range(steps):
            generator.manual_seed(100 * optimizer.freezer.step + world.rank)
            torch.manual_seed(optimizer.freezer.step)
            tokens = torch.randint(0, 20, (8, 6), generator=generator)
            loss = functional.cross_entropy(model(tokens, (tokens > 0).float()), tokens.sum(1) % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.report_loss(loss.item())
            optimizer.step()

    return model, optimizer, train


def check_a_model_with_several_inputs_freezes_by_vote(world: World) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("hvfreeze").addHandler(handler)
    logging.getLogger("hvfreeze").setLevel(logging.INFO)
    model, optimizer, train = text_training(world, vote_weight="loss")
    names = [block.name for block in optimizer.freezer.chain.blocks]
    assert names == ["embedding", "layers.0", "layers.1", "layers.2", "head"], names
    assert "position" in optimizer.freezer.chain.blocks[1].parameter_names
    train(40)
    assert optimizer.freezer.cut > 0, "forty steps without a single frozen block"
    assert any("frozen: embedding" in record.getMessage() for record in records) == (world.rank == 0)
    check_replicas(model, world, step=40)


def check_a_resumed_script_is_the_uninterrupted_one(world: World) -> None:
    model, optimizer, train = text_training(world)
    train(19)
    saved = copy.deepcopy(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "freezer": optimizer.freezer_state_dict()}
    )
    plain = torch.optim.AdamW(Text().parameters(), lr=1e-2)
    plain.load_state_dict(saved["optimizer"])  # as without hvfreeze
    frozen = optimizer.freezer.cut
    assert frozen > 0
    train(6)
    for order in (("model", "optimizer", "freezer"), ("freezer", "optimizer", "model")):
        again, resumed, go_on = text_training(world)
        load = {
            "model": again.load_state_dict,
            "optimizer": resumed.load_state_dict,
            "freezer": resumed.load_freezer_state_dict,
        }
        for part in order:
            load[part](copy.deepcopy(saved[part]))
        assert resumed.freezer.cut == frozen
        go_on(6)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
        assert resumed.freezer.cut_history == optimizer.freezer.cut_history
    # Rank 0's alone, as scripts save it.
    again, resumed, go_on = text_training(world)
    everyone = world.broadcast_object(saved, name="test.checkpoint")
    again.load_state_dict(everyone["model"])
    resumed.load_state_dict(everyone["optimizer"])
    resumed.load_freezer_state_dict(everyone["freezer"])
    go_on(6)
    assert resumed.freezer.cut >= frozen
    check_replicas(again, world, step=25)
