"""Load files of tensors from untrusted sources without running code.

`weights_only=True` is safe since torch 2.10: below 2.6 a file could bypass it (CVE-2025-32434), and below 2.10 a file
could corrupt memory (CVE-2026-24747). setup.py requires 2.10, and an older torch loads nothing.
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
        RefusedError: this torch is not safe for untrusted files.
        Exception: any error of the unpickler for damaged files and other content.
    """
    check_torch(torch.__version__)
    return torch.load(file, map_location="cpu", weights_only=True)


def check_torch(version: str) -> None:
    """Raise RefusedError for a torch below `OLDEST_TORCH`."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise RefusedError(
            f"torch {version} is not safe: a file of tensors can run code in it (CVE-2025-32434, "
            f"CVE-2026-24747); install torch {oldest} or newer"
        )
