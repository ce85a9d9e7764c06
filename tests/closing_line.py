"""Prints one line that counts the tests of several JUnit files: `python -m tests.closing_line FILE...`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree


def closing_line(files: Sequence[Path]) -> str:
    """Return how many tests passed, failed and were skipped."""
    counts: Counter[str] = Counter()
    for file in files:
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            counts.update({name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")})
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return f"{passed} passed, {failed} failed, {counts['skipped']} skipped"


if __name__ == "__main__":
    print(closing_line([Path(name) for name in sys.argv[1:]]))
