from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

NEEDS_THE_OPERATORS = """
import torch
__version__ = "0.0"
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        raise RuntimeError(f"operator torchvision::{name} does not exist")
"""
PRINT = "from hvfreeze.torchvision_shim import shim_used, torchvision; print(torchvision.__version__, shim_used())"


def import_with(folder: Path, *, source: str) -> subprocess.CompletedProcess[str]:
    """Imports through the shim in a new process where torchvision is a package of one file with `source`."""
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(source)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", PRINT], env=env, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_torchvision_that_loads_is_taken_as_it_is(tmp_path: Path) -> None:
    done = import_with(tmp_path, source="__version__ = '0.0'")
    assert done.stdout.split() == ["0.0", "False"]
    assert done.stderr == ""


def test_missing_operators_are_declared_without_a_word(tmp_path: Path) -> None:
    done = import_with(tmp_path, source=NEEDS_THE_OPERATORS)
    assert done.stdout.split() == ["0.0", "True"], done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    "statement",
    ["raise RuntimeError('operator torchvision::roi_align does not exist')", "raise ImportError('no such library')"],
)
def test_any_other_failure_is_left_alone(tmp_path: Path, statement: str) -> None:
    done = import_with(tmp_path, source=statement)
    assert done.returncode == 1
    assert statement.split("'")[1] in done.stderr.splitlines()[-1]


def test_models_and_transforms_of_the_installed_torchvision_work() -> None:
    from hvfreeze.torchvision_shim import torchvision

    assert "resnet18" in torchvision.models.list_models()
    assert torchvision.transforms.functional.hflip is not None
