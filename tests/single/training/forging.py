"""Checkpoints that no run has saved: of any sections, of any bytes, and of what wants to run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hvfreeze.runs.checkpoint_file import Saving


def save_sections(directory: Path, sections: Sequence[Tensor], *, step: int) -> Path:
    """Write what ranks share, and a section for each rank, as a run does; return the file's path."""
    saving = Saving(directory, step=step, size=len(sections) - 1, lengths=[len(section) for section in sections])
    for section in sections:
        saving.put(section)
    saving.finish()
    saving.result()
    return saving.path


def forged(shared: bytes, own: bytes = b"", **header: Any) -> bytes:
    """A file around two sections whose digest is right."""
    line = json.dumps({"step": 1, "size": 1, "sections": [len(shared), len(own)], **header}).encode() + b"\n"
    return line + shared + own + hashlib.sha256(line + shared + own).hexdigest().encode()


class Evil:
    def __init__(self, probe: Path) -> None:
        self.probe = probe

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.probe),)
