"""Loads files of tensors that anybody may have written, without running what is in them.

`weights_only=True` keeps that promise since torch 2.10: below 2.6 a file could get round it (CVE-2025-32434), below
2.10 a file could corrupt memory (CVE-2026-24747). setup.py asks for as much; an older torch that is there all the same
loads nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import IO, Any

import torch

from hvfreeze.errors import RefusedError

OLDEST_TORCH = (2, 10)


def load_plain(file: Path | IO[bytes]) -> Any:
    """Return the plain values and tensors in a `torch.save` archive, in the CPU's memory.

    Raises:
        RefusedError: this torch cannot be trusted with a stranger's file.
        Exception: whatever the unpickler raises of a file that is damaged or holds anything else.
    """
    check_torch(torch.__version__)
    return torch.load(file, map_location="cpu", weights_only=True)


def check_torch(version: str) -> None:
    """Refuse a torch below `OLDEST_TORCH`.

    Raises:
        RefusedError: it is so.
    """
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise RefusedError(
            f"torch {version} can be made to run code by a file that it loads (CVE-2025-32434, CVE-2026-24747): "
            f"install torch {oldest} or newer"
        )
