"""A setting of votes means votes, and votes begin where they do in our own program: at the end of the first epoch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hvfreeze
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.freezing.freezer import freeze_by_vote
from hvfreeze.integration.optimizer import DistributedOptimizer
from hvfreeze.integration.script_world import log
from tests.single.integration import test_telling

SAMPLES, ROWS = 48, 4
STEPS = SAMPLES // ROWS


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1)), [0, 1] * (SAMPLES // 2)))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=generator), torch.arange(SAMPLES) % 2)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))


def wrap(net: nn.Module, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net, world=SoloWorld(), **options)


def train(net: nn.Module, optimizer: DistributedOptimizer, loader: Any, *, epochs: int, passes: int = 1) -> None:
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader):
            if number % passes == 0:
                optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            if (number + 1) % passes == 0:
                optimizer.step()


@pytest.mark.parametrize(
    ("given", "votes_by"),
    [
        ({"interval": 50}, "coherence"),
        ({"quorum": 0.9}, "coherence"),
        ({"interval": None}, "coherence"),
        ({"freeze": "percentile", "interval": 3}, "percentile"),
        ({"freeze": "none", "interval": 50}, "none"),
        ({}, "none"),
    ],
)
def test_a_setting_of_votes_means_votes(given: dict[str, Any], votes_by: str) -> None:
    settings = FreezeConfig(**given)
    assert wrap(model(), settings=settings).freezer.settings.freeze == votes_by
    assert wrap(model(), settings=copy.deepcopy(settings)).freezer.settings.freeze == votes_by
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    freezer = freeze_by_vote(net, sgd, SoloWorld(), steps_per_epoch=2, num_epochs=2, settings=settings)
    assert freezer.settings.freeze == votes_by
    assert replace(settings, quorum=0.6).of_script().freeze == settings.freeze, "all of these are given"


@pytest.mark.parametrize(
    ("settings", "words"), [({"eta_max": 0.1}, "freeze='gradient-norm'"), ({"signal": "averaged"}, "coherence")]
)
def test_a_setting_of_another_criterion_asks_for_it(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        wrap(model(), settings=FreezeConfig(**settings))


def loaders() -> dict[str, Any]:
    workers = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    return {
        "sized": DataLoader(data(), batch_size=ROWS),
        "workers": DataLoader(data(), batch_size=ROWS, **workers),
        "batches of a sampler": DataLoader(data(), batch_sampler=[[i, i + 1, i + 2, i + 3] for i in range(0, 48, 4)]),
    }


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("sized", {}), ("workers", {"settings": FreezeConfig(interval=5)}), ("batches of a sampler", {})],
)
def test_the_loader_says_how_long_an_epoch_is(kind: str, settings: dict[str, Any]) -> None:
    histories = []
    validation = DataLoader(data(), batch_size=2 * ROWS)
    for known in (STEPS, None):
        net, loader = model(), loaders()[kind]
        held = iter(validation)  # one that has not begun
        optimizer = wrap(net, steps_per_epoch=known, **settings)
        train(net, optimizer, loader, epochs=3)
        cadence = optimizer.freezer.cadence
        assert (cadence.steps_per_epoch, cadence.first_vote) == (STEPS, STEPS)
        coherence = optimizer.freezer.state_dict()["coherence"]
        histories.append((optimizer.freezer.cut_history, coherence["complete"], cadence.interval))
        del held
    assert histories[0] == histories[1] and len(histories[0][1]) >= 2


def test_passes_that_are_added_up_make_a_step() -> None:
    net = model()
    optimizer = wrap(net, backward_passes_per_step=5)
    train(net, optimizer, DataLoader(data(), batch_size=ROWS), epochs=1, passes=5)
    assert optimizer.freezer.cadence.steps_per_epoch == 3


def test_a_loader_without_a_length_is_known_after_its_first_pass() -> None:
    net = model()
    optimizer = wrap(net)
    loader = DataLoader(Stream(), batch_size=ROWS)
    train(net, optimizer, loader, epochs=1)
    assert optimizer.freezer.cadence.steps_per_epoch is None
    train(net, optimizer, loader, epochs=1)
    assert optimizer.freezer.cadence.steps_per_epoch == STEPS and optimizer.freezer.cadence.interval == STEPS // 2


def test_a_cached_loader_says_it_before_the_first_step(tmp_path: Path) -> None:
    optimizer = wrap(model())
    hvfreeze.CachedLoader(DataLoader(data(), batch_size=ROWS), optimizer, directory=tmp_path)
    assert optimizer.freezer.cadence.first_vote == STEPS
    hvfreeze.CachedLoader(DataLoader(data(), batch_size=2), optimizer, directory=tmp_path)
    assert optimizer.freezer.cadence.first_vote == STEPS, "the first one decides"


def test_what_was_learned_is_in_the_checkpoint() -> None:
    net = model()
    optimizer = wrap(net)
    train(net, optimizer, DataLoader(data(), batch_size=ROWS), epochs=1)
    resumed = wrap(model())
    resumed.load_freezer_state_dict(optimizer.freezer_state_dict())
    assert resumed.freezer.cadence == optimizer.freezer.cadence and resumed.freezer.step == STEPS


@pytest.mark.parametrize(
    ("options", "loader", "lines"),
    [
        (
            {},
            "sized",
            [
                "votes by coherence: the first at the end of the first epoch",
                "first after step 12; an epoch has 12 steps",
            ],
        ),
        (
            {},
            "list",
            [
                "votes by coherence: the first at the end of the first epoch",
                "a vote every 100 steps, the first after step 500; the epoch length is unknown",
            ],
        ),
        (
            {"settings": FreezeConfig(interval=7), "steps_per_epoch": 9},
            "list",
            ["every 7 steps, the first after step 9"],
        ),
        ({"settings": FreezeConfig()}, "list", ["no block will be frozen: settings has freeze 'none'"]),
        ({"settings": FreezeConfig(freeze="static", cut=1)}, "list", ["frozen from the start: 1 block"]),
    ],
)
def test_the_first_line_says_when_the_first_vote_is_held(
    options: dict[str, Any],
    loader: str,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    test_telling.silent(monkeypatch)
    gc.collect()  # iterators that other tests have left
    net = model()
    optimizer = wrap(net, **options)
    batches = DataLoader(data(), batch_size=ROWS)
    train(net, optimizer, batches if loader == "sized" else [next(iter(batches))], epochs=1)
    log(SoloWorld(), "the end")
    said = capsys.readouterr().err.splitlines()[:-1]
    assert len(said) >= len(lines) and all(words in line for words, line in zip(lines, said)), said
