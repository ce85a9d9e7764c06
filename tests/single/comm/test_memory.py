from __future__ import annotations

import gc
import platform
from pathlib import Path

import pytest
import torch

from hvfreeze.comm.resources import end_set_up, peak_memory_bytes
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.freezing.freezer import freeze_by_vote
from hvfreeze.strategies import whole_replicas
from tests.program import call

MIB = 2**20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked for what it keeps")
def test_what_set_up_has_freed_is_neither_held_nor_counted_any_more() -> None:
    # Pieces that come from the heap, and one in fifty that stays: so the heap cannot shrink automatically.
    pieces = [torch.ones(16 * 1024) for _ in range(4000)]
    held = pieces[::50]
    before = peak_memory_bytes()
    del pieces
    end_set_up()
    after = peak_memory_bytes()
    assert before - after > 150 * MIB, (before / MIB, after / MIB)
    assert all(float(piece.sum()) == 16 * 1024 for piece in held)


def test_the_peak_is_the_most_since_then() -> None:
    end_set_up()
    before = peak_memory_bytes()
    assert before > 10 * MIB
    float(torch.ones(16 * MIB).sum())
    assert 60 * MIB < peak_memory_bytes() - before < 80 * MIB, "64 MiB were there, and are not any more"
    end_set_up()
    assert peak_memory_bytes() < before + 8 * MIB


@pytest.mark.parametrize(("freeze", "tensors"), [("none", 0), ("linear", 0), ("gradient-norm", 1)])
def test_sums_of_gradients_are_there_where_a_criterion_looks_at_them(freeze: str, tensors: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(37, 41), torch.nn.Linear(41, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = FreezeConfig(freeze=freeze)
    freezer = freeze_by_vote(model, optimizer, SoloWorld(), steps_per_epoch=9, num_epochs=9, settings=settings)
    freezer.reducer.begin()
    model(torch.ones(2, 37)).sum().backward()
    freezer.reducer.finish()
    optimizer.step()
    freezer.after_step(0.0)
    optimizer.zero_grad()
    assert sum(type(found) is torch.Tensor and found.shape == (41, 37) for found in gc.get_objects()) == tensors


def test_replicas_give_back_what_set_up_has_freed_before_their_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(whole_replicas, "give_back", lambda: given_back.append(1))
    flags = "--model mlp-16x16 --train-samples 32 --batch-size 16 --epochs 2 --threads 1 --quiet".split()
    assert call("train", *flags, "--run-dir", str(tmp_path / "run")).returncode == 0
    assert given_back == [1]
