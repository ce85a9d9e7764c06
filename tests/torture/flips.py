"""Bits that flip in the checkpoints and cached rows of a real run: each is refused by name, or changes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.reader import ActivationFile
from hvfreeze.errors import RefusedError
from hvfreeze.runs import checkpoint_file as checkpoint
from tests.program import call
from tests.torture.kills import TRAINING

REFUSED, SAME, SILENT, UNNAMED = range(4)
WORDS = ("refused", "same", "silent", "unnamed")
THROUGH_THE_PROGRAM = 25
"""Every so many flips, the program itself meets the damage, which takes seconds; else its reader does."""


class Victim:
    """A run that has ended, and what its files hold."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        ended = call("train", *TRAINING, "--run-dir", str(self.run))
        assert ended.returncode == 0, str(ended)
        self.digest = self.digest_of(self.run)
        # As if the run had been stopped before its end: the resumed run reads the checkpoint and the cache.
        newest = checkpoint.newest(self.run / "checkpoints")
        assert newest is not None
        newest.unlink()
        (self.run / "summary.json").unlink()
        before = checkpoint.newest(self.run / "checkpoints")
        assert before is not None
        self.checkpoint = before
        self.cached = sorted((self.run / "cache").glob("*.h5"), key=lambda path: path.stat().st_size)[-1]
        self.state = self.read(self.checkpoint)
        self.rows = self.read(self.cached)

    @staticmethod
    def digest_of(run: Path) -> str:
        found: str = json.loads((run / "summary.json").read_text())["parameter_digest"]
        return found

    def read(self, path: Path) -> Any:
        """Return all that the reader makes of a file."""
        if path.suffix == ".pt":
            opened = checkpoint.open_checkpoint(path, size=1)
            sections = [opened.section(number) for number in range(2)]
            for section in sections:
                checkpoint.unpacked(section, name=str(path))
            return opened.step, [section.numpy().tobytes() for section in sections]
        file = ActivationFile(path)
        file.verify()
        rows = file.read(torch.arange(len(file.keys)))
        return file.manifest, file.keys.tobytes(), rows.numpy().tobytes()

    def judge(self, path: Path, expected: Any) -> int:
        """Read a damaged file in a copy of this process, which the damage may end; tell what became of it."""
        child = os.fork()
        if child == 0:
            code = SILENT
            try:
                code = SAME if self.read(path) == expected else SILENT
            except (CacheFault, RefusedError) as fault:
                code = REFUSED if path.name in str(fault) else UNNAMED
            finally:
                os._exit(code)
        deadline = time.monotonic() + 60
        while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
        # A library that crashes has noticed.
        return os.WEXITSTATUS(found[1]) if os.WIFEXITED(found[1]) else REFUSED


def flipped(content: bytes, chance: random.Random) -> tuple[bytes, int]:
    """Return a copy with one bit flipped, and which; half of the flips are in the first and last part of the file."""
    bits = 8 * len(content)
    edge = min(bits, 8 * 2048)
    place = chance.choice(
        [chance.randrange(bits), chance.choice([chance.randrange(edge), bits - 1 - chance.randrange(edge)])]
    )
    damaged = bytearray(content)
    damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged), place


def round_of(victim: Victim, chance: random.Random, *, number: int) -> dict[str, Any]:
    """Flip a bit and return what was found."""
    begun = time.monotonic()
    path, expected = chance.choice([(victim.checkpoint, victim.state), (victim.cached, victim.rows)])
    damaged, place = flipped(path.read_bytes(), chance)
    what: dict[str, Any] = {"file": path.suffix, "bit": place}
    if number % THROUGH_THE_PROGRAM:
        copy = victim.folder / path.name
        copy.write_bytes(damaged)
        copy.chmod(0o600)
        verdict = victim.judge(copy, expected)
        copy.unlink()
        faults = ["silent"] if verdict in (SILENT, UNNAMED) else []
        return {"seconds": time.monotonic() - begun, "faults": faults, **what, "found": WORDS[verdict]}
    run = victim.folder / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(victim.run, run)
    with (run / path.relative_to(victim.run)).open("r+b") as file:
        file.write(damaged)
    ended = call("train", *TRAINING, "--run-dir", str(run), "--resume")
    named = any(path.name in message for message in ended.messages)
    refused = ended.returncode == 3 and named and len(ended.messages) == 1
    unharmed = ended.returncode == 0 and victim.digest_of(run) == victim.digest
    faults = [] if refused or unharmed else ["wrong resume" if ended.returncode == 0 else "corrupt"]
    faults += ["traceback"] if "Traceback" in ended.stderr else []
    found = {"program": True, "code": ended.returncode, "said": ended.messages[:1]}
    return {"seconds": time.monotonic() - begun, "faults": faults, **what, **found}
