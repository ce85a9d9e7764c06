"""A user without a home directory, as in a container that has no entry for it: what needs none works, the rest asks."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvfreeze
from hvfreeze.comm.world import SoloWorld
from hvfreeze.doctor.this_machine import check_home
from hvfreeze.errors import UsageError
from hvfreeze.integration.optimizer import DistributedOptimizer
from tests.program import call


@pytest.fixture(autouse=True)
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "XDG_CACHE_HOME", "HVFREEZE_DATA", "TORCH_HOME", "USER", "LOGNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_what_needs_no_home_directory_runs_without(tmp_path: Path) -> None:
    flags = "--data digits --model mlp-16x16 --train-samples 64 --batch-size 32 --epochs 1 --quiet --run-dir".split()
    outcome = call("train", *flags, str(tmp_path / "run"))
    assert outcome.returncode == 0, str(outcome)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--data cifar10", 2, "has no home directory: name a folder with --data-dir or $HVFREEZE_DATA"),
        ("--data digits --weights ~/weights.pt", 3, "weights (~/weights.pt) cannot be read"),
        ("--data digits --weights ~nobody-known/weights.pt", 3, "weights (~nobody-known/weights.pt) cannot be read"),
    ],
)
def test_what_would_lie_there_is_asked_for(flags: str, code: int, words: str, tmp_path: Path) -> None:
    outcome = call("train", *flags.split(), "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == code and len(outcome.messages) == 1 and words in outcome.messages[0], str(outcome)


def test_a_cached_loader_asks_for_its_directory() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, world=SoloWorld())
    loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.arange(8) % 2), batch_size=4)
    with pytest.raises(UsageError, match=r"has no home directory: pass directory= to CachedLoader"):
        hvfreeze.CachedLoader(loader, optimizer)


def test_the_doctor_says_so() -> None:
    assert check_home("~").verdict == "note" and check_home("/").verdict in ("OK", "note")
    assert check_home("/nonexistent").verdict == "note"
