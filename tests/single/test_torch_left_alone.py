"""Neither the program nor a script's optimizer changes PyTorch: its modules, its optimizers, its compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.program import ROOT

SEEN = """
import inspect, os, sys
import torch

HOME = os.path.dirname(torch.__file__)

def modules():
    return {name: id(module) for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}

def codes():
    "Of each function of a class, the files of its code, from the outermost wrapper on."
    kinds = [torch.optim.Optimizer, *(k for k in vars(torch.optim).values() if isinstance(k, type))]
    found = {}
    for kind in [*kinds, torch.nn.Module, torch.Tensor, torch.utils.data.DataLoader, torch.amp.GradScaler]:
        for name, function in vars(kind).items():
            while inspect.isfunction(function):
                found.setdefault((kind.__name__, name), []).append(function.__code__.co_filename)
                function = getattr(function, "__wrapped__", None)
    return found

if {compiles}:
    layer = torch.nn.Linear(2, 2)
    torch.compile(layer, backend="eager")(torch.ones(1, 2))
before, known = modules(), codes()
{code}
assert before.items() <= modules().items(), "a module was replaced"
assert known.keys() <= codes().keys(), "a method is gone"
foreign = {key: files for key, files in codes().items() if not all(file.startswith(HOME) for file in files)}
assert all(known.get(key) == files for key, files in foreign.items()), foreign
outside = [name for name in modules() if type(sys.modules[name]).__module__.startswith("hvfreeze")]
assert not outside, outside
# PyTorch wraps a step once for its gradient mode and once for its hooks.
assert [len(codes()[kind, "step"]) for kind in ("SGD", "AdamW", "Adam")] == [len(known["SGD", "step"]) + 1] * 3
"""
MADE = "\nfor kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam):\n    kind([torch.zeros(1)], lr=0.1)\n"
SCRIPT = """
import hvfreeze
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = hvfreeze.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model=model)
compiled = torch.compile(model, backend="aot_eager") if {compiles} else model
scaler = torch.amp.GradScaler("cpu")
for _ in range(3):
    optimizer.zero_grad()
    scaler.scale(compiled(torch.randn(3, 4)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
assert optimizer.freezer.step == 3
assert not {compiles} or torch._dynamo.utils.counters["frames"]["ok"] > 0
"""


PROGRAM = """
from hvfreeze.__main__ import main
for number, words in enumerate({commands}):
    assert main([*words.split(), "--run-dir", f"{folder}/{number}"]) == 0
"""
COMPILER = """
import torch._dynamo
from torch._dynamo.utils import counters
assert torch._dynamo.__file__.endswith("__init__.py") and type(torch._dynamo.utils).__name__ == "module"
"""
COMMANDS = [
    "train --model mlp-16 --optimizer adamw --train-samples 64 --epochs 1 --quiet",
    "auto digits --model mlp-16x16 --train-samples 64 --epochs 1 --quiet",
]


def check(code: str, *, compiles: bool, first: str = "") -> None:
    seen = SEEN.replace("{code}", code + MADE).replace("{compiles}", str(compiles))
    done = subprocess.run(
        [sys.executable, "-c", first + seen + COMPILER], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_runs_and_a_script_change_nothing_of_pytorch(tmp_path: Path) -> None:
    program = PROGRAM.replace("{commands}", repr(COMMANDS)).replace("{folder}", str(tmp_path))
    check(program + SCRIPT, compiles=False)


@pytest.mark.seldom
def test_a_compiled_script_changes_nothing_of_pytorch_and_the_compiler_is_there_behind_hvfreeze() -> None:
    check(SCRIPT, compiles=True, first="import hvfreeze, hvfreeze.integration.optimizer, hvfreeze.training.run\n")
