"""The settings of the activation cache. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from hvfreeze.config.section import Alternative, Section, setting
from hvfreeze.rules import choice, reads, rule


def parse_bytes(text: str) -> int | None:
    """Return the bytes in a size such as `500M` or `20G` (K, M, G, T are powers of 1024), None for `none`.

    Raises:
        UsageError: it is no such size, or larger than any disk.
    """
    if text == "none":
        return None
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMGT]?)i?B?", text)
    rule(found is not None, "cache-limit", text, "none or a size such as 500M or 20G")
    assert found is not None
    return int(float(found.group(1)) * 1024 ** " KMGT".index(found.group(2) or " "))


Size = Annotated[str, reads(parse_bytes)]
CACHED = Alternative("--cache auto or on", lambda config: config.cache.cache != "off")


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Section):
    """Whether and where the output of the frozen prefix is stored."""

    cache: Annotated[str, choice("off", "auto", "on")] = setting(
        "off",
        "MODE",
        "off, auto (when it pays) or on; needs --augment none or views:K",
        brief="store features: off, auto or on",
    )
    cache_dir: str | None = setting(
        None,
        "DIR",
        "folder of the files, which stay after the run; default: the run directory",
        of=CACHED,
    )
    cache_dtype: Annotated[str, choice("native", "float16", "bfloat16")] = setting(
        "native", "TYPE", "native (exact), float16 or bfloat16", of=CACHED
    )
    cache_limit: Size = setting("none", "SIZE", "disk space of all ranks together, as in 20G; default: none", of=CACHED)
    cache_shared: bool = setting(
        False,
        "",
        "let ranks read the files of other ranks on a shared file system; files of other users and groups are trusted",
        of=CACHED,
    )
    cache_failure: Annotated[str, choice("recompute", "stop")] = setting(
        "recompute", "HOW", "on a full disk or a damaged file: recompute (continue without it) or stop", of=CACHED
    )

    def limit_bytes(self) -> int | None:
        """Return the limit in bytes over all ranks, None for no limit."""
        return parse_bytes(self.cache_limit)
