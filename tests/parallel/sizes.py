"""Numbers of ranks as a test's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def seldom(*values: object) -> Any:
    """Return a parameter that only `make torture` takes: what it would find, the others mostly find too."""
    return pytest.param(*values, marks=pytest.mark.torture)


def sizes(*often: int, of: Iterable[int] = (1, 2, 3, 4)) -> list[Any]:
    """Return every number of ranks in `of`: those in `often` for all runs of the tests, the others for torture."""
    return [pytest.param(size) if size in often else seldom(size) for size in of]
