from __future__ import annotations

import pytest
import torch
from torch import nn

from hvfreeze.model import activation_memory
from hvfreeze.model.activation_memory import activation_bytes, note_on_memory
from hvfreeze.model.model_sources import build_model


def test_what_autograd_saves_is_counted_once_and_without_parameters() -> None:
    # The convolution saves its input, ReLU and the linear layer share ReLU's output; 4 bytes a value.
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 64, 2))
    assert activation_bytes(model, (3, 8, 8)) == 4 * (3 * 64 + 5 * 64)


def test_measuring_changes_neither_the_model_nor_what_is_drawn_at_random() -> None:
    model = build_model("shufflenet_v2_x0_5", num_classes=3, image_size=32).model.eval()
    before, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    assert activation_bytes(model, (3, 32, 32)) > 100_000
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert torch.get_rng_state().equal(drawn) and not model.training


@pytest.mark.parametrize(
    ("mebibytes", "advice"),
    [(1000, ""), (50, "--batch-size 32 --accumulate 2"), (10, "--batch-size 8 --accumulate 8")],
)
def test_a_batch_that_does_not_fit_is_told_with_one_that_does(
    mebibytes: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_memory, "available_bytes", lambda processes: mebibytes * 2**20)
    monkeypatch.setattr(activation_memory, "activation_bytes", lambda model, shape: 2**19)
    notes = note_on_memory(nn.Linear(1, 1), (3, 8, 8), batch_size=64, ranks=2)
    assert len(notes) == bool(advice) and advice in "".join(notes)
