"""The rules of a card's entries: a card may come from anywhere."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvfreeze.errors import RefusedError

PRECISIONS = ("float32", "bfloat16")
LARGEST = 4096
MOST_ROWS = 2**20


def whole(most: int, *, least: int = 1) -> Any:
    """Return the rule of a whole number."""
    return lambda v: type(v) is int and least <= v <= most, f"a whole number in {least}..{most}"


def triple(ok: Any, wanted: str) -> Any:
    """Return the rule of a number per channel."""

    def judge(value: Any) -> bool:
        numbers = isinstance(value, list) and len(value) == 3 and all(type(v) in (int, float) for v in value)
        return numbers and all(math.isfinite(v) and ok(v) for v in value)

    return judge, wanted


def is_text(value: Any) -> bool:
    """Tell whether a value is text that says something."""
    return isinstance(value, str) and bool(value)


def is_digest(value: Any) -> bool:
    """Tell whether a value is a SHA-256 as hex."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def are_classes(value: Any) -> bool:
    """Tell whether a value is a list of different names."""
    return isinstance(value, list) and bool(value) and all(map(is_text, value)) and len(set(value)) == len(value)


def are_versions(value: Any) -> bool:
    """Tell whether a value is names with texts."""
    return isinstance(value, dict) and all(is_text(k) and is_text(v) for k, v in value.items())


TEXT = (is_text, "text")
SHA = (is_digest, "a SHA-256 of 64 hexadecimal digits")
SIDE = (lambda v: v is None or (type(v) is int and 1 <= v <= LARGEST), f"null or in 1..{LARGEST}")
ENTRIES: dict[str, Any] = {
    **dict.fromkeys(("model", "blocks", "head", "data", "weights"), TEXT),
    "classes": (are_classes, "a list of different names"),
    "precision": (lambda v: v in PRECISIONS, "one of " + ", ".join(PRECISIONS)),
    "batch_size": whole(MOST_ROWS),
    **dict.fromkeys(("code_sha256", "weights_sha256"), (lambda v: v is None or is_digest(v), "null or " + SHA[1])),
    "accuracy": (lambda v: type(v) in (int, float) and 0 <= v <= 1, "in 0..1"),
    "accuracy_on": (lambda v: v in ("test", "held-out"), "test or held-out"),
    "epochs": whole(2**63, least=0),
    "steps": whole(2**63, least=0),
    "parameter_digest": SHA,
    "sha256": SHA,
    "versions": (are_versions, "names and versions"),
}
IMAGE_ENTRIES: dict[str, Any] = {
    "height": whole(LARGEST),
    "width": whole(LARGEST),
    **dict.fromkeys(("cropped_to", "enlarged_to"), SIDE),
    "mean": triple(lambda v: True, "three numbers"),
    "std": triple(lambda v: v > 0, "three positive numbers"),
}


def checked(path: Path, tree: Mapping[str, Any], rules: Mapping[str, Any], *, within: str = "") -> dict[str, Any]:
    """Return the entries that have rules; raise RefusedError where one is missing or breaks its own."""
    for name, (ok, wanted) in rules.items():
        if name not in tree:
            raise RefusedError(f"{path} is damaged: it lacks {within}{name}")
        if not ok(tree[name]):
            raise RefusedError(f"{path} is damaged: {within}{name} ({str(tree[name])[:80]}) must be {wanted}")
    return {name: tree[name] for name in rules}
