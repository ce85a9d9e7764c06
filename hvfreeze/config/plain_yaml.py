"""YAML of plain values: nothing in a file can run code, nor make the reader spend more than the file is long."""

from __future__ import annotations

from typing import Any

import yaml

MOST_BYTES = 2**20
DEEPEST = 16


class PlainLoader(yaml.SafeLoader):
    """Reads values without aliases, which can stand for exponentially many, and of few levels, which are recursion."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a value, or refuse it where it is an alias or lies too deep."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias (*NAME) is not read; write the value out")
        if self._depth >= DEEPEST:
            raise yaml.YAMLError(f"values are nested deeper than {DEEPEST} levels")
        self._depth += 1
        try:
            node: yaml.Node | None = super().compose_node(parent, index)
        finally:
            self._depth -= 1
        return node


def parse_plain_yaml(text: bytes) -> Any:
    """Return the value in UTF-8 YAML `text`, at most 1 MiB; None for an empty one.

    Raises:
        ValueError: it is something else; says in one line what.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES} bytes")
    try:
        return yaml.load(text.decode("utf-8"), PlainLoader)
    except Exception as error:  # forged values make the constructors raise anything: KeyError, IndexError, ...
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            reason if isinstance(error, (yaml.YAMLError, ValueError)) else f"{type(error).__name__}: {reason}"
        ) from error
