"""Checkpoints that nobody has saved: of any tree, and of what wants to run."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def forged(shared: bytes, own: bytes = b"", **header: Any) -> bytes:
    """A file around two sections whose digest is right."""
    line = json.dumps({"step": 1, "size": 1, "sections": [len(shared), len(own)], **header}).encode() + b"\n"
    return line + shared + own + hashlib.sha256(line + shared + own).hexdigest().encode()


class Evil:
    def __init__(self, probe: Path) -> None:
        self.probe = probe

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.probe),)
