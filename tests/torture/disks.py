"""Disks that fill up anywhere in a run: one message, no damaged file, and the run continues when there is room."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.program import call
from tests.torture.flips import Victim
from tests.torture.kills import TRAINING

ROOM = 2**26
CODES = (0, 2, 3)


@contextmanager
def disk(folder: Path, *, size: int) -> Iterator[bool]:
    """Mount a file system of `size` bytes; tell whether that is allowed here."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def used_by(run: Path) -> int:
    """Return the bytes of a run's files."""
    return sum(path.stat().st_size for path in run.rglob("*") if path.is_file())


def round_of(victim: Victim, chance: random.Random) -> dict[str, Any] | None:
    """Run where a random amount of room is, then go on with more; None where nothing may be mounted."""
    begun = time.monotonic()
    size = int(used_by(victim.run) * chance.uniform(0.005, 1.6))
    folder = victim.folder / "disk"
    with disk(folder, size=size) as mounted:
        if not mounted:
            return None
        run = folder / "run"
        first = call("train", *TRAINING, "--run-dir", str(run))
        left = [path.name for path in run.rglob(".*.tmp")]
        subprocess.run(["mount", "-o", f"remount,size={ROOM}", str(folder)], check=True)
        second = call("train", *TRAINING, "--run-dir", str(run), "--resume")
        right = second.returncode == 0 and victim.digest_of(run) == victim.digest
    faults = [] if right else ["wrong resume" if second.returncode == 0 else "corrupt"]
    clear = first.returncode in CODES and len(first.messages) == bool(first.returncode) and not left
    faults += [] if clear else ["traceback" if "Traceback" in first.stderr else "corrupt"]
    found = {"bytes": size, "code": first.returncode, "said": first.messages, "left": left, "then": second.returncode}
    details = {"first": first.stderr[-1500:], "second": second.stderr[-1500:]} if faults else {}
    return {"seconds": time.monotonic() - begun, "faults": faults, **found, **details}
