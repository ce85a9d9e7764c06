"""What is public is documented: by docstrings, on the page that they make, and the first steps in the README."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hvfreeze
from tests.program import ROOT


def members(name: str) -> Iterator[tuple[str, Any]]:
    """A public name and, of a class, its public methods and properties that are written here."""
    value = getattr(hvfreeze, name)
    yield name, value
    for own in vars(value) if inspect.isclass(value) else ():
        member = inspect.getattr_static(value, own)
        member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if not own.startswith("_") and inspect.isfunction(member):
            yield f"{name}.{own}", member


@pytest.mark.parametrize("name", hvfreeze.__all__)
def test_every_public_name_and_method_has_a_docstring_of_its_own(name: str) -> None:
    # A dataclass without one is given its signature.
    silent = [path for path, value in members(name) if re.match(rf"({name}\(.*\))?$", value.__doc__ or "", re.DOTALL)]
    assert silent == []


def test_the_page_has_every_public_name_and_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    command = [sys.executable, "-W", "ignore", "-m", "launch.api_reference", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    page = (tmp_path / "hvfreeze.html").read_text()
    told = set(re.findall(r'id="([\w.]+)"', page))
    wanted = {path for name in hvfreeze.__all__ for path, _ in members(name)}
    assert wanted <= told, wanted - told
    text = re.sub(r"<[^>]+>", "", page)
    assert "averages gradients over ranks, and freezes front blocks" in text.replace("\n", " ")


def test_the_readme_tells_what_a_script_needs_first() -> None:
    readme = (ROOT / "README.md").read_text()
    first = {"DistributedOptimizer", "CachedLoader", "FreezeConfig", "freeze_by_vote", "load", "Chain", "Freezer"}
    assert first <= set(hvfreeze.__all__)
    assert [name for name in sorted(first) if name not in readme] == []
