"""The digest of a prefix's operations: the same function has one digest everywhere, another function another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.freezing.frozen_prefix import hold_in_eval
from hvfreeze.model.blocks import Chain, cut_into_blocks
from hvfreeze.prefix.operations import operations_digest
from hvfreeze.torchvision_shim import torchvision

FACTOR = 2.0
models: Any = torchvision.models


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Shift(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor


class Apply:
    def __init__(self, power: int) -> None:
        self.power = power

    def __call__(self, x: Tensor) -> Tensor:
        return x**self.power


def digest(*steps: Any) -> str:
    """Return the digest of a prefix of these steps, each a module or a function."""
    torch.manual_seed(0)
    model = nn.ModuleDict({f"m{k}": step for k, step in enumerate(steps) if isinstance(step, nn.Module)})
    model["head"] = nn.Linear(4, 2)
    return operations_digest(Chain.from_modules(model, [("body", list(steps)), ("head", model["head"])]), 1)


def adding(amount: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x + amount


def hooked() -> nn.Module:
    module = nn.ReLU()
    module.register_forward_hook(lambda module, inputs, output: output + 1)
    return module


TANH = nn.Tanh()
DIFFERENT: dict[str, Callable[[], str]] = {
    "relu": lambda: digest(nn.ReLU()),
    "leaky relu": lambda: digest(nn.LeakyReLU()),
    "another slope": lambda: digest(nn.LeakyReLU(0.2)),
    "pool": lambda: digest(nn.MaxPool2d(2)),
    "pool with another stride": lambda: digest(nn.MaxPool2d(2, stride=1)),
    "order": lambda: digest(nn.MaxPool2d(2), nn.ReLU()),
    "other order": lambda: digest(nn.ReLU(), nn.MaxPool2d(2)),
    "one inside another": lambda: digest(nn.Sequential(TANH, nn.ReLU())),
    "the same one twice": lambda: digest(nn.Sequential(TANH, nn.ReLU(), TANH)),
    "batch norm": lambda: digest(nn.BatchNorm2d(3)),
    "another eps": lambda: digest(nn.BatchNorm2d(3, eps=1e-4)),
    "a hook": lambda: digest(hooked()),
    "a setting that no repr shows": lambda: digest(Scale(1.0)),
    "another": lambda: digest(Scale(3.0)),
    "the class's code": lambda: digest(Shift(1.0)),
    "a function of torch": lambda: digest(torch.tanh),
    "of a library": lambda: digest(functional.relu),
    "of one's own": lambda: digest(scaled),
    "a lambda": lambda: digest(lambda x: x + 1),
    "another constant": lambda: digest(lambda x: x + 2),
    "what it closes over": lambda: digest(adding(1.0)),
    "another value": lambda: digest(adding(2.0)),
    "a partial": lambda: digest(partial(torch.clamp, min=0)),
    "its arguments": lambda: digest(partial(torch.clamp, min=1)),
    "an object": lambda: digest(Apply(2)),
    "what it holds": lambda: digest(Apply(3)),
    "a default": lambda: digest(lambda x, by=1: x + by),
    "another default": lambda: digest(lambda x, by=2: x + by),
}


def test_another_function_has_another_digest() -> None:
    digests = {name: build() for name, build in DIFFERENT.items()}
    assert len(set(digests.values())) == len(digests), digests


def test_the_same_function_has_the_same_digest_whenever_it_is_built() -> None:
    assert [build() for build in DIFFERENT.values()] == [build() for build in DIFFERENT.values()]


def test_a_constant_that_a_function_names_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(scaled)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    assert digest(scaled) != before


@pytest.mark.parametrize("file", ["helpers_of_mine.py", "helpers_of_mine/inner.py", "hvfreeze_of_mine.py"])
def test_the_code_of_a_module_that_a_function_names_counts(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name, place = file.partition("/")[0].removesuffix(".py"), tmp_path / file
    place.parent.mkdir(exist_ok=True)
    if "/" in file:
        (place.parent / "__init__.py").write_text("from helpers_of_mine.inner import act\n")
    place.write_text("def act(x): return x\n")
    script: dict[str, Any] = {"__name__": "script_of_mine"}
    exec(f"import {name} as helpers, torch\ndef step(x): return torch.abs(helpers.act(x))", script)
    before = digest(script["step"])
    assert digest(script["step"]) == before
    place.write_text("def act(x): return -x\n")
    assert digest(script["step"]) != before
    for each in (name, f"{name}.inner"):
        sys.modules.pop(each, None)


def squeezenet(blocks: str) -> Chain:
    torch.manual_seed(0)
    return cut_into_blocks(models.squeezenet1_1(), scheme=blocks)


def test_where_a_block_ends_counts_although_no_tensor_tells() -> None:
    before, after = (squeezenet(f"features.0,features.{start},classifier") for start in (2, 3))
    assert [name for name, _ in before.named_parameters(0, 1)] == [name for name, _ in after.named_parameters(0, 1)]
    assert operations_digest(before, 1) != operations_digest(after, 1)


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5"])
def test_freezing_and_training_do_not_change_it(name: str) -> None:
    chain = cut_into_blocks(models.get_model(name))
    cut = len(chain.blocks) - 1
    before = operations_digest(chain, cut)
    for module in chain.modules(0, cut):
        hold_in_eval(module)
    assert operations_digest(chain, cut) == before
    assert operations_digest(chain, cut - 1) != before


def some_digests() -> str:
    return " ".join([operations_digest(squeezenet("stage"), 2), digest(adding(1.0), Apply(2), Scale(2.0), scaled)])


@pytest.mark.seldom
def test_another_process_finds_the_same() -> None:
    program = f"from {__name__} import some_digests; print(some_digests())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == some_digests()
