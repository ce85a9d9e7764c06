"""The standing processes of this pytest process: one a rank number, started when a job first has that many ranks.

Ranks do not share one, so that what differs between processes differs between ranks: the order of sets of strings, and
addresses.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from tests.parallel.startup.handover import address

LOADED = ("torch", "torch._dynamo", "hvfreeze.torchvision_shim", "numpy", "PIL.Image", "tqdm", "yaml")
PROGRAM = Path(__file__).with_name("standing.py")
REST = Path(__file__).with_name("startup") / "rest.cpp"
FRESH = "HVFREEZE_TEST_FRESH"
"""Set, it makes every rank a new process that loads PyTorch itself."""
ROOM_FOR_VARIABLES = {"HVFREEZE_TEST_ROOM": " " * 65536}
"""See `show_variables` in startup/becoming.py."""


@dataclass
class _Standing:
    process: subprocess.Popen[bytes]
    said: IO[bytes]


_common = f"hvfreeze-test-{os.getpid()}-{secrets.token_hex(16)}"
_standing: dict[int, _Standing] = {}
_starting = threading.Lock()


def ready(ranks: int, variables: Mapping[str, str]) -> str:
    """See to it that there is a standing process for each of `ranks` ranks, and return what they are asked by.

    Args:
        ranks: The number of ranks.
        variables: What tests give a process; only the first call's count.

    Raises:
        AssertionError: see `check`.
    """
    check()
    with _starting:
        for number in range(ranks):
            if number not in _standing:
                _standing[number] = _start(number, variables)
    return _common


def check() -> None:
    """See to it that every standing process is there. One that is not is forgotten: who asks next gets a new one.

    Raises:
        AssertionError: some have ended since the last call; with what they said.
    """
    with _starting:
        ended = {number: one for number, one in _standing.items() if one.process.poll() is not None}
        said = [_last_words(number, _standing.pop(number)) for number in ended]
    assert not said, "\n".join(said)


def processes() -> list[int]:
    """Return the standing processes by rank number."""
    return [_standing[number].process.pid for number in sorted(_standing)]


def end() -> None:
    """End the standing processes, and with them what is left of their copies."""
    with _starting:
        for standing in _standing.values():
            try:
                standing.process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                standing.process.kill()
                standing.process.communicate()
            standing.said.close()
        _standing.clear()


def _start(number: int, variables: Mapping[str, str]) -> _Standing:
    said = tempfile.TemporaryFile()  # noqa: SIM115
    known = {name: value for name, value in variables.items() if not name.startswith("HVFREEZE_")}
    if rest := _built():
        known.setdefault("LD_PRELOAD", str(rest))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # Whoever asks while it is loading waits.
        listener.bind(address(_common, str(number)))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(listener.fileno()), *LOADED],
            env=known | ROOM_FOR_VARIABLES,
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
        )
    return _Standing(process, said)


@cache
def _built() -> Path | None:
    """Return the library of startup/rest.cpp; None where it cannot be built, and ranks wait as they do for users."""
    library = REST.parents[3] / "build/tests" / REST.with_suffix(".so").name
    if not library.exists() or library.stat().st_mtime < REST.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Another process of the tests may be at it too.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            new = Path(folder) / library.name
            try:
                subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", new, REST], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                return None
            new.rename(library)
    return library


def _last_words(number: int, standing: _Standing) -> str:
    code = standing.process.returncode
    assert standing.process.stdin is not None
    standing.process.stdin.close()
    with standing.said as said:
        said.seek(0)
        return f"standing process {number} has ended with {code}: {said.read().decode(errors='replace')}"
