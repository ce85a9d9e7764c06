from __future__ import annotations

import shutil
from pathlib import Path

import hvfreeze
from hvfreeze.runs.environment import PACKAGES, describe_environment, facts_of_this_rank, source_digest


def test_what_ranks_share_is_one_value_and_what_they_do_not_is_a_list() -> None:
    mine = facts_of_this_rank()
    other = {**mine, "host": "elsewhere", "threads": mine["threads"] + 1, "cores": 1}
    found = describe_environment([mine, other, mine])
    assert found["size"] == 3 and found["hosts"] == [mine["host"], "elsewhere", mine["host"]]
    assert found["threads"] == [mine["threads"], mine["threads"] + 1, mine["threads"]]
    assert (found["processor"], found["cores"]) == (mine["processor"], mine["cores"])
    assert set(found["versions"]) == {*PACKAGES, "hvfreeze"}


def test_any_other_source_of_any_module_has_another_digest(tmp_path: Path) -> None:
    copy = tmp_path / "hvfreeze"
    shutil.copytree(Path(hvfreeze.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert source_digest(copy) == source_digest()
    modules = sorted(copy.rglob("*.py"))
    assert any("cache" in module.relative_to(copy).parts for module in modules), "the cache's modules count too"
    for module in (modules[0], copy / "cache" / "activations.py", copy / "strategies" / "base.py"):
        text = module.read_text()
        module.write_text(text + "\n")
        assert source_digest(copy) != source_digest(), module
        module.write_text(text)
    (copy / "model" / "extra.py").touch()
    assert source_digest(copy) != source_digest()
