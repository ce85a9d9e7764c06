from __future__ import annotations

from pathlib import Path

import pytest

from hvfreeze.config.tree import read_yaml
from hvfreeze.errors import UsageError
from hvfreeze.plain_yaml import DEEPEST, MOST_BYTES, parse_plain_yaml

BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghijklmnopqrstuvwx", "bcdefghijklmnopqrstuvwxy")
)
FORGED = {
    "alias bomb": (BOMB, "alias"),
    "key twice": ("seed: 1\nlr: 0.5\nseed: 2\n", "the key seed occurs twice"),
    "key twice deeper down": ("optimizer: {lr: 0.5, epochs: 2, lr: 0.1}\n", "the key lr occurs twice"),
    "merge bomb": ("a: &a {x: 1}\nb: {<<: [*a, *a]}\n", "alias"),
    "deep lists": ("[" * 200_000, "deeper"),
    "deep blocks": ("".join(f"{' ' * n}k:\n" for n in range(900)), "deeper"),
    "long": ("a: " + "x" * MOST_BYTES, "longer"),
    "number of many digits": ("a: " + "9" * 5000, "digits"),
    "no truth value": ("a: !!bool perhaps", "KeyError"),
    "empty number": ('a: !!int ""', "IndexError"),
    "impossible date": ("a: 2020-13-45", "month"),
    "object": ("a: !!python/object/apply:os.getpid []", "python/object"),
}


@pytest.mark.parametrize(("text", "reason"), FORGED.values(), ids=FORGED)
@pytest.mark.timeout(20)
def test_yaml_that_is_more_than_plain_values_is_refused_at_once(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"--config \(.*\) is not plain YAML: .*{reason}") as refusal:
        read_yaml(path)
    assert len(str(refusal.value)) < 1000 and "\n" not in str(refusal.value)


def test_plain_values_are_read() -> None:
    assert parse_plain_yaml(b"") is None
    assert parse_plain_yaml(b"a: {b: [1, 2.5, yes, null, text]}") == {"a": {"b": [1, 2.5, True, None, "text"]}}
    assert parse_plain_yaml(b"[" * (DEEPEST - 1) + b"1" + b"]" * (DEEPEST - 1))
