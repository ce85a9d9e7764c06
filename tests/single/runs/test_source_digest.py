from __future__ import annotations

import shutil
from pathlib import Path

import hvfreeze
from hvfreeze.runs.environment import source_digest


def test_any_other_source_of_any_module_has_another_digest(tmp_path: Path) -> None:
    copy = tmp_path / "hvfreeze"
    shutil.copytree(Path(hvfreeze.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert source_digest(copy) == source_digest()
    modules = sorted(copy.rglob("*.py"))
    assert any(module.parent.name == "file" for module in modules), "the cache's modules count too"
    for module in (modules[0], copy / "cache" / "planning" / "plan.py", copy / "strategies" / "strategy.py"):
        text = module.read_text()
        module.write_text(text + "\n")
        assert source_digest(copy) != source_digest(), module
        module.write_text(text)
    (copy / "chain" / "extra.py").touch()
    assert source_digest(copy) != source_digest()
