"""Messages for the user of a script, with and without the script's logging."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.integration.optimizer import DistributedOptimizer
from hvfreeze.integration.script_world import log


def silent(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Return the logger as in a script that has configured no logging, without the handlers that pytest has set up."""
    logger = logging.getLogger("hvfreeze")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [])
    return logger


def train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    settings = FreezeConfig(freeze="gradient-norm", interval=2, freeze_warmup=4, eta_max=float("inf"))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model=model, settings=settings, world=SoloWorld())
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()


def test_without_logging_the_first_vote_and_every_move_are_lines_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = silent(monkeypatch)
    train()
    lines = capsys.readouterr().err.splitlines()
    # Votes are after 4, 6, 8 and 10 steps; nothing is left to freeze after the second move.
    assert "gradient-norm" in lines[0] and "the first after step 4" in lines[1]
    assert [line.split(":")[:2] for line in lines[2:]] == [["hvfreeze", " step 4"], ["hvfreeze", " step 10"]], lines
    assert all("frozen:" in line and "quorum 0.5" in line for line in lines[2:])
    assert logger.handlers == [] and logger.level == logging.NOTSET, "the script's logging is its own"


def test_the_scripts_own_logging_decides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    logger = silent(monkeypatch)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    train()
    assert records == [], "a warning is the least that is shown by default"
    logger.setLevel(logging.INFO)
    try:
        train()
    finally:
        logger.setLevel(logging.NOTSET)
    assert [record.levelno for record in records] == [logging.INFO] * 4
    assert capsys.readouterr().err == ""


def test_only_rank_0_tells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    silent(monkeypatch)

    class Second(SoloWorld):
        rank = 1

    log(Second(), "never")
    log(SoloWorld(), "%d of %s", 1, "two")
    assert capsys.readouterr().err == "hvfreeze: 1 of two\n"
