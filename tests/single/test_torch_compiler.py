from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.program import ROOT

LOADED = "import sys\nprint('torch._dynamo' in sys.modules)\n"


def said_by(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("flags", ["--freeze auto", "--optimizer sgd", "--optimizer adamw"])
def test_a_run_never_loads_the_compiler(tmp_path: Path, flags: str) -> None:
    words = f"train --data digits --epochs 1 {flags} --quiet --run-dir {tmp_path / 'run'}".split()
    assert said_by(f"from hvfreeze.__main__ import main\nassert main({words}) == 0\n{LOADED}") == ["False"]


def test_torchvision_is_imported_without_it_and_has_it_when_it_asks() -> None:
    said = said_by(
        "from hvfreeze.torchvision_shim import torchvision\n"
        f"{LOADED}"
        "from torchvision.ops.roi_align import is_compile_supported as lazily\n"
        "print(lazily('cpu'))\n"
        f"{LOADED}"
        "from torch._dynamo.utils import is_compile_supported\n"
        "print(is_compile_supported('cpu'))\n"
    )
    assert said[0] == "False" and said[2] == "True" and said[1] == said[3]


def test_what_needs_more_of_the_compiler_than_torchvision_has_it_whole() -> None:
    said = said_by(
        "import torch\n"
        "from hvfreeze.torch_imports import compiler_stood_in_for\n"
        "with compiler_stood_in_for():\n"
        "    from torch._dynamo.utils import counters\n"
        "import torch._dynamo.utils\n"
        "print(torch._dynamo.utils.counters is counters, torch._dynamo.utils.__file__.endswith('utils.py'))\n"
    )
    assert said == ["True True"]


def test_optimizers_and_compiled_models_work_behind_it() -> None:
    said = said_by(
        "import torch\n"
        "from hvfreeze.torch_imports import leave_compiler_out\n"
        "leave_compiler_out()\n"
        "layer = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)\n"
        f"{LOADED}"
        "torch.compile(layer, backend='eager')(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
        "optimizer.load_state_dict(optimizer.state_dict())\n"
        "optimizer.zero_grad()\n"
        "print(len(optimizer.state), layer.bias.grad)\n"
    )
    assert said == ["False", "2 None"]


def test_an_optimizer_behind_it_makes_the_same_steps_in_the_same_gradient_mode() -> None:
    steps = (
        "import torch\n"
        "layer = torch.nn.Linear(3, 2)\n"
        "torch.nn.init.constant_(layer.weight, 0.5)\n"
        "torch.nn.init.constant_(layer.bias, 0.5)\n"
        "def closure():\n"
        "    optimizer.zero_grad()\n"
        "    with torch.enable_grad():\n"
        "        loss = layer(torch.ones(1, 3)).square().sum()\n"
        "    loss.backward()\n"
        "    return loss\n"
        "for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):\n"
        "    optimizer = make(layer.parameters(), lr=0.1)\n"
        "    print(optimizer.step(closure), torch.is_grad_enabled(), layer.weight.tolist(), layer.bias.tolist())\n"
    )
    without = "from hvfreeze.torch_imports import leave_compiler_out\nleave_compiler_out()\n"
    plain, behind = said_by(steps + LOADED), said_by(without + steps + LOADED)
    assert plain[:-1] == behind[:-1] and (plain[-1], behind[-1]) == ("True", "False")
