"""Files that runs of an earlier version wrote are read; tests/kept/configs has some, each with its command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hvfreeze.cli import parse
from hvfreeze.config.flags import configuration
from hvfreeze.config.tree import from_dict, read_yaml
from tests.program import ROOT

FILES = sorted((ROOT / "tests" / "kept" / "configs").glob("*.yaml"))
FOLLOWS = {"data", "head_fit", "optimizer"}
"""What an earlier file of `auto` does not tell from what was given."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_of_an_earlier_run_makes_the_same_run(file: Path) -> None:
    line = file.read_text().splitlines()[0].removeprefix("# hvfreeze ")
    words = shlex.split(line.replace("train --freeze auto", "auto digits").replace("--mirror", "--flips"))
    now, found = configuration(parse(words)), from_dict(read_yaml(file))
    assert found == now.resolved()
    assert found.given ^ now.given <= (FOLLOWS if words[0] == "auto" else set())
    again = configuration(parse([words[0], "--config", str(file), "--run-dir", "runs/a"]))
    assert again.resolved() == now.resolved()
    changed = configuration(parse([words[0], "--config", str(file), "--seed", "9"]))
    assert changed.run.seed == 9 and changed.run.run_dir is None and changed.strategy == now.strategy
