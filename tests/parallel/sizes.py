"""Numbers of ranks as a test's parameters, and which of them `make test` takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def seldom(*values: object) -> Any:
    """Return a parameter that only `make test-all` takes: what it would find, the others mostly find too."""
    return pytest.param(*values, marks=pytest.mark.seldom)


def sizes(*often: int, of: Iterable[int] = (1, 2, 3, 4)) -> list[Any]:
    """Return every number of ranks in `of`: those in `often` for `make test`, the others for `make test-all`."""
    return [pytest.param(size) if size in often else seldom(size) for size in of]
