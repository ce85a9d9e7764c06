"""The digest of a prefix's operations: the same function has one digest everywhere, another function another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
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


def step_of(script: str, helpers: str = "") -> Any:
    """Return `step` of a script that names a module `helpers`, which names itself; both are given as code."""
    named, naming = types.ModuleType("helpers_of_mine"), types.ModuleType("script_of_mine")
    vars(named)["inner"] = vars(naming)["helpers"] = named
    exec(helpers, vars(named))
    exec(script, vars(naming))
    return vars(naming)["step"]


ACT = "class Act:\n def __init__(self): self.by = {}\n def __call__(self, x): return Act and x * self.by + {}"
SHIFT = "BY = [{}]\ndef act(x): return x * BY[0]"
ARRAY = "import numpy\nBY = numpy.full(1, {})"
REACHED: dict[str, tuple[str, str, str]] = {
    "a function": ("def step(x): return helpers.act(x)", "def act(x): return x", "def act(x): return x + 1"),
    "what it names": ("def step(x): return helpers.act(x)", SHIFT.format(1), SHIFT.format(2)),
    "a constant": ("def step(x): return x * helpers.BY", "BY = 1", "BY = 2"),
    "a module": ("def step(x): return helpers.inner.inner.act(x)", "def act(x): return x", "def act(x): return -x"),
    "how an object is made": ("def step(x): return helpers.Act()(x)", ACT.format(1, 0), ACT.format(2, 0)),
    "a method": ("def step(x): return helpers.Act()(x)", ACT.format(1, 0), ACT.format(1, 1)),
    "a dict": ("def step(x): return x * helpers.BY['a'][0]", "BY = {'a': [1]}", "BY = {'a': [2]}"),
    "functions in a dict": ("def step(x): return helpers.BY[0](x)", "BY = {0: lambda x: x}", "BY = {0: lambda x: -x}"),
    "an array": ("def step(x): return x * helpers.BY", ARRAY.format(1), ARRAY.format(2)),
}


@pytest.mark.parametrize("what", REACHED)
def test_what_a_function_reaches_counts_in_its_own_module_and_in_others(what: str) -> None:
    script, before, after = REACHED[what]
    own = re.sub(r"helpers\.(inner\.)*", "", script)
    assert digest(step_of(script, before)) == digest(step_of(script, before)) != digest(step_of(script, after))
    first, again, other = (digest(step_of(f"{code}\n{own}")) for code in (before, before, after))
    assert first == again != other


@pytest.mark.parametrize(
    ("script", "before", "after"),
    [
        ("def step(x): return helpers.act(x) * x.size(0)", "size = 1\ndef act(x): return x", ""),
        ("def step(x): return helpers.act(x) * x.size(0)", "def act(x): return x\ndef other(x): return x", ""),
        ("def step(x):\n helpers.KEPT[0] = x\n return x", "KEPT = {}", "KEPT = {1: 1}"),
        ("def step(x):\n helpers.KEPT.append(1)\n return x", "KEPT = []", "KEPT = [1]"),
        ("def step(x): return x if helpers.ANY else x", "ANY = [object()]", "ANY = [[], object()]"),
    ],
    ids=["another name", "another function", "a cache", "a list that grows", "objects"],
)
def test_what_a_function_does_not_use_or_changes_itself_does_not_count(script: str, before: str, after: str) -> None:
    after = after or "size = 2\ndef act(x): return x"
    assert digest(step_of(script, before)) == digest(step_of(script, after))


def test_an_installed_package_counts_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of("import numpy as np\nimport torch\ndef step(x): return torch.abs(x) + np.pi")
    before = digest(step)
    monkeypatch.setattr("hvfreeze.prefix.operations.version_of", lambda package: f"0 of {package}")
    assert digest(step) != before


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
    reached = [step_of(script, helpers) for script, helpers, _ in REACHED.values()]
    own = digest(adding(1.0), Apply(2), Scale(2.0), scaled, *reached)
    return f"{operations_digest(squeezenet('stage'), 2)} {own}"


@pytest.mark.seldom
def test_another_process_finds_the_same() -> None:
    program = f"from {__name__} import some_digests; print(some_digests())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == some_digests()
