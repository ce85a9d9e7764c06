from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hvfreeze.freezing.frozen import hold_in_eval, release, release_model, trainable_of


def pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    found: nn.Module = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    return found


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_a_copy_of_a_model_with_frozen_blocks_holds_its_own_and_can_be_released(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    hold_in_eval(model[0])
    again = copied(model)
    again.train()
    assert not again[0].training and again[1].training  # type: ignore[index]
    release(again[0])  # type: ignore[index]
    again.eval()
    again.train()
    assert again[0].training and not model[0].training  # type: ignore[index]


def test_what_its_owner_has_frozen_is_never_released() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    trainable = trainable_of(model)
    model[1].requires_grad_(False)
    release_model(model, trainable)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True, True, True]
