"""Saves a checkpoint again and again, killed before a later line of its code each time, until one save survives.

Arguments: a folder with checkpoints, and a folder in which the copy N of it is what the kill before line N left. The
copy "lost" has what was left by the end of the process after an interrupt between a checkpoint's first section and the
next.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hvfreeze.runs import checkpoint_file as checkpoint
from hvfreeze.runs import files
from tests.single.training.forging import save_sections


def save_and_die(directory: Path, *, step: int, lines: int) -> None:
    """Save, and be killed when `lines` lines of its code have been run."""
    left = lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in (checkpoint.__file__, files.__file__):
            return None
        if event == "line":
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return trace

    state = {"step": step, "weights": torch.full((1000,), float(step))}
    threading.settrace(trace)
    save_sections(directory, [checkpoint.packed(state), checkpoint.packed({"rank": 0})], step=step)
    os._exit(0)


def main() -> None:
    base, copies = Path(sys.argv[1]), Path(sys.argv[2])
    for lines in count():
        directory = copies / str(lines)
        shutil.copytree(base, directory)
        child = os.fork()
        if child == 0:
            save_and_die(directory, step=3, lines=lines)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            checkpoint.Saving(copies / "lost", step=1, size=1, lengths=[1])
            sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
