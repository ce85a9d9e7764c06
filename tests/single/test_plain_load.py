from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from hvfreeze import plain_load
from hvfreeze.doctor import this_machine
from hvfreeze.errors import RefusedError
from hvfreeze.model.weights import read_weights
from hvfreeze.runs.checkpoint_file import packed, unpacked

ROOT = Path(__file__).resolve().parents[2]


def required() -> str:
    """What setup.py asks of torch."""
    words = [
        node.value for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Constant)
    ]
    return next(str(word) for word in words if re.match(r"torch\W", str(word)))


def test_setup_the_doctor_and_the_loader_name_one_floor() -> None:
    oldest = ".".join(map(str, plain_load.OLDEST_TORCH))
    assert required() == this_machine.TORCH
    assert this_machine.TORCH.startswith(f"torch>={oldest},") and this_machine.OLDEST_TORCH == plain_load.OLDEST_TORCH
    assert this_machine.TORCH.endswith(",<" + ".".join(map(str, this_machine.UNTRIED_TORCH)))
    with pytest.raises(RefusedError, match=f"install torch {oldest} or newer"):
        plain_load.check_torch("2.9.1+cpu")
    for version in (f"{oldest}.0", "2.13.0+cpu", "3.0.0a0"):
        plain_load.check_torch(version)


def test_an_older_torch_loads_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    assert list(read_weights(str(tmp_path / "weights.pt"))) == ["weight"]
    state = packed({"step": 1})
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    for load in (lambda: read_weights(str(tmp_path / "weights.pt")), lambda: unpacked(state, name="step-1.pt")):
        with pytest.raises(RefusedError, match=r"torch 2\.5\.1 is not safe"):
            load()


def test_no_other_place_loads_an_archive() -> None:
    files = [*(ROOT / "hvfreeze").rglob("*.py"), *(ROOT / "cache").rglob("*.py"), *(ROOT / "analysis").glob("*.py")]
    loading = [path for path in files if re.search(r"(torch|pickle)\.load\b", path.read_text())]
    calls = {
        path.name
        for path in loading
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load")
    }
    # What ranks of one job send each other in memory is no file.
    assert calls == {"plain_load.py", "horovod_world.py"}
