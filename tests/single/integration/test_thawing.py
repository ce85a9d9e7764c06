"""In a training script, frozen blocks are probed in some steps, and thaw by vote."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hvfreeze.comm.world import SoloWorld
from hvfreeze.integration.optimizer import DistributedOptimizer
from tests.single.integration.probed_script import Script, equal

LOOKED = [7, 8, 9, 10, 12, 13, 14, 15]
"""Steps after the freeze in which there are looks, up to the first vote that may thaw."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
}


@pytest.mark.parametrize(("passes", "dtype"), [(3, None), (1, torch.bfloat16)])
def test_looks_change_nothing_but_the_vote(
    passes: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    probing, resting = Script(sgd, passes=passes), Script(sgd, passes=passes)
    monkeypatch.setattr(probing.seen, "_gains_of", lambda *of, **among: ())
    probing.freezer.freeze(1)
    resting.freezer.freeze(1)
    resting.seen.next_probe = 10**9
    before = copy.deepcopy(probing.model.stem)
    for script in (probing, resting):
        script.train(17, dtype=dtype)
        assert script.freezer.cut == 1
    assert probing.reached == LOOKED and resting.reached == []
    assert equal(probing.model, resting.model) and equal(probing.model.stem, before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_block_that_was_frozen_too_early_thaws_and_learns_under_every_optimizer(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(OPTIMIZERS[name])
    script.train(2)
    script.freezer.freeze(1)
    script.train(12)
    assert script.freezer.cut == 1
    with caplog.at_level(logging.INFO, logger="hvfreeze"):
        script.train(1)
    assert script.freezer.cut == 0, "nobody has seen what the frozen block would gain"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("step 15: thawed: stem (gains 0.") and "frozen: nothing (cut 1 has only 0.000 of" in line
    before = script.front.detach().clone()
    state = script.inner.state.get(script.front, {})
    assert not any(bool(value.any()) for value in state.values()), "the optimizer remembers what was before the freeze"
    assert script.model.stem.training and script.front.requires_grad
    script.train(1)
    assert not torch.equal(before, script.front)
    script.train(4)


def test_a_block_that_gains_nothing_stays_frozen() -> None:
    script = Script(sgd)
    # What comes out of the first block does not reach the loss.
    nn.init.zeros_(script.model.middle.weight)
    script.model.middle.weight.requires_grad_(False)
    script.freezer.freeze(1)
    script.train(32)
    assert script.reached == [*LOOKED, 27, 28, 29, 30, 32] and script.freezer.cut == 1


@pytest.mark.parametrize("freeze", ["gradient-norm", "linear"])
def test_no_other_criterion_looks_at_frozen_blocks(freeze: str) -> None:
    script = Script(sgd, freeze=freeze, shadow="coherence", eta_max=1e-9)
    script.freezer.freeze(1)
    script.train(20)
    assert script.reached == [] and script.freezer.cut >= 1


@pytest.mark.parametrize("stop", [8, 15])
def test_a_resumed_script_looks_and_thaws_as_the_uninterrupted_one(stop: int) -> None:
    straight = Script(OPTIMIZERS["adamw"])
    straight.freezer.freeze(1)
    straight.train(stop)
    saved = straight.state()
    straight.train(20 - stop)
    resumed = Script(OPTIMIZERS["adamw"])
    resumed.load(saved)
    resumed.train(20 - stop)
    assert equal(straight.model, resumed.model)
    histories = [script.freezer.cut_history for script in (straight, resumed)]
    assert histories[0] == histories[1] and [move.cut for move in histories[0]] == [0, 1, 0]
    assert resumed.reached == [step for step in LOOKED if step > stop]


def test_a_step_whose_gradients_overflow_says_nothing() -> None:
    script = Script(sgd)
    script.freezer.freeze(1)
    script.train(8)
    script.train(1, scale=math.inf, steps_made=False)
    assert [len(part) for part in script.seen.parts] == [8, 8]
    script.train(2)
    assert script.seen.probes == [()], "three gradients are too few"
    script.train(5)
    assert script.freezer.cut == 1


def test_who_switches_parameters_or_moves_the_cut_between_steps_is_followed() -> None:
    script = Script(sgd)
    script.freezer.freeze(1)
    script.train(7)
    assert script.front.requires_grad and script.freezer.probing
    script.freezer.freeze(2)
    assert not script.front.requires_grad and not script.freezer.probing
    script.freezer.thaw(0)
    assert script.front.requires_grad
    script.model.zero_grad()
    script.model(script.batch(1)[0]).sum().backward()
    assert script.front.grad is not None, "a hook of a look has stayed"


def test_what_a_script_switches_on_in_a_frozen_block_is_not_clipped_and_trains_once_the_block_thaws() -> None:
    script = Script(sgd)
    script.front.requires_grad_(False)
    script.freezer.freeze(1)
    script.front.requires_grad_(True)
    script.model(script.batch(1)[0]).sum().backward()
    assert script.front.grad is not None
    script.optimizer.synchronize()
    assert script.front.grad is None and not script.front.requires_grad, "each rank would clip by its own gradient"
    script.freezer.thaw(0)
    assert script.front.requires_grad


def test_a_second_optimizer_has_parameters_that_a_look_would_have_reached() -> None:
    script = Script(sgd)
    script.freezer.freeze(1)
    script.train(7)
    later = DistributedOptimizer(sgd(script.model.parameters()), model=script.model, world=SoloWorld())
    script.model(script.batch(1)[0]).sum().backward()
    assert script.front.grad is not None
    later.step()
