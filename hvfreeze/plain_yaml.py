"""Read plain values from YAML without constructing other objects."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import yaml

MOST_BYTES = 2**20
DEEPEST = 16
BOOLEAN, INTEGER = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:int"


class PlainLoader(yaml.SafeLoader):
    """A YAML loader without aliases, which can expand exponentially, and with a limited depth.

    It refuses repeated keys; YAML readers take the last one. As on a command line, `on` and `off` are text, and a
    number with a leading 0 is decimal; in YAML 1.1 these are booleans and octal.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a value; refuse aliases and values that are nested too deep."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*NAME) are not supported; write the value out")
        if self._depth >= DEEPEST:
            raise yaml.YAMLError(f"values are nested deeper than {DEEPEST} levels")
        self._depth += 1
        try:
            node: yaml.Node | None = super().compose_node(parent, index)
        finally:
            self._depth -= 1
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key, count in keys.most_common(1):
                if count > 1:
                    raise yaml.YAMLError(f"the key {key} occurs twice; remove one")
        return node


def construct_integer(loader: PlainLoader, node: yaml.ScalarNode) -> int:
    """Return the integer in a file."""
    if re.fullmatch(r"[-+]?0[0-9]+", text := str(loader.construct_scalar(node))):
        return int(text)
    return loader.construct_yaml_int(node)


PlainLoader.add_constructor(INTEGER, construct_integer)
PlainLoader.yaml_implicit_resolvers = {
    first: [entry for entry in known if first not in ("o", "O") or entry[0] != BOOLEAN]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def in_words(error: Exception) -> str:
    """Return the line and the problem of an error of YAML's syntax; "" for other errors."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return ""
    mark = error.context_mark or error.problem_mark
    problem = error.problem.replace("'<stream end>'", "the end of the file").replace("the node content", "a value")
    problem = re.sub("<(.*?)>", r"\1", problem)
    return f"line {mark.line + 1}: {problem}" if mark else problem


def parse_plain_yaml(text: bytes, *, most_bytes: int = MOST_BYTES) -> Any:
    """Return the value in UTF-8 YAML `text`, of `most_bytes` at most; None for an empty one.

    Raises:
        ValueError: it has other content; the message is one line.
    """
    if len(text) > most_bytes:
        raise ValueError(f"it is longer than {most_bytes} bytes")
    try:
        return yaml.load(text.decode("utf-8"), PlainLoader)
    except Exception as error:  # forged values make the constructors raise anything: KeyError, IndexError, ...
        reason = " ".join((in_words(error) or str(error)).split()) or type(error).__name__
        raise ValueError(
            reason if isinstance(error, (yaml.YAMLError, ValueError)) else f"{type(error).__name__}: {reason}"
        ) from error
