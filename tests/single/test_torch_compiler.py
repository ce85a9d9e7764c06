from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.program import ROOT

LOADED = "import sys\nprint('torch._dynamo' in sys.modules)\n"


def said_by(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_run_that_solves_its_head_never_loads_the_compiler(tmp_path: Path) -> None:
    words = f"train --data digits --epochs 1 --freeze auto --quiet --run-dir {tmp_path / 'run'}".split()
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
