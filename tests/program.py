"""Runs the real program, in this process where its end does not matter, else in one of its own; as one rank."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from hvfreeze.__main__ import main
from tests.parallel.mpirun import ROOT, environment

NOBODY = 65534
OFFLINE = {
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "no_proxy": "",
    "NO_PROXY": "",
}
"""Variables that prevent downloads: no server listens on the discard port."""


@dataclass(frozen=True)
class Outcome:
    """What the program left: its exit code and its output."""

    returncode: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        """The exit code and both outputs, for a failing assertion."""
        return f"exit {self.returncode}\n--- stdout\n{self.stdout[-6000:]}\n--- stderr\n{self.stderr[-6000:]}"

    @property
    def messages(self) -> list[str]:
        """What the program said it refuses, a message a line."""
        lines = self.stderr.splitlines()
        return [line.removeprefix("hvfreeze: error: ") for line in lines if line.startswith("hvfreeze: error: ")]


def call(*arguments: str) -> Outcome:
    """Runs `hvfreeze ARGUMENTS` in this process."""
    hook = sys.excepthook
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            code = main(arguments)
        finally:
            sys.excepthook = hook
    return Outcome(code, stdout.getvalue(), stderr.getvalue())


def succeed(*arguments: str) -> Outcome:
    """Run `hvfreeze ARGUMENTS` in this process; its exit code must be 0."""
    outcome = call(*arguments)
    assert outcome.returncode == 0, str(outcome)
    return outcome


def summary_of(run: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def digest_of(run: Path) -> str:
    """Return the digest of a run's parameters."""
    return str(summary_of(run)["parameter_digest"])


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def spawn(*arguments: str, env: Mapping[str, str] | None = None, timeout: float = 120.0) -> Outcome:
    """Runs `python -m hvfreeze ARGUMENTS` in a process of its own, in the repository's root."""
    variables = environment(env or {}, out=Path("/nonexistent"), timeout=timeout)
    ended = subprocess.run(
        [sys.executable, "-m", "hvfreeze", *arguments],
        env=variables,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Outcome(ended.returncode, ended.stdout, ended.stderr)


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Makes file permissions count for this process, which they do not for root."""
    # What the program loads when it needs it: without privileges its source may be out of reach.
    importlib.import_module("hvfreeze.training.run")
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder: the bytes of files, None for folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def save_photos(folder: Path, *, sides: tuple[int, ...] = (32,), classes: str = "ab", training: int = 24) -> Path:
    """Writes an image folder: `training` and 4 images of each class, whose sides take turns."""
    for part, count in (("train", training), ("test", 4)):
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                side = sides[number % len(sides)]
                image = Image.new("RGB", (side, side), (7 * number, 80 * len(name), 40))
                image.save(folder / part / name / f"{number:02d}.png")
    return folder
