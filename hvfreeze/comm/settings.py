"""The parser of --compression. No torch."""

from __future__ import annotations

import re

from hvfreeze.rules import rule


def parse_compression(text: str) -> tuple[str, int]:
    """Return the kind of a --compression value (none, fp16, powersgd or auto), and powersgd's rank, 0 for the others.

    Raises:
        UsageError: it is neither `none`, `fp16`, `auto` nor `powersgd:R` with R from 1 to 256.
    """
    if text in ("none", "fp16", "auto"):
        return text, 0
    found = re.fullmatch(r"powersgd:([1-9][0-9]{0,2})", text)
    rank = int(found.group(1)) if found else 0
    rule(1 <= rank <= 256, "compression", text, "none, fp16, auto, or powersgd:R with R in 1..256, such as powersgd:4")
    return "powersgd", rank
