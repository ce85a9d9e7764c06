"""Where a run's numbers come from: the source that made it, when, and on what machine with which versions.

RESULTS/<experiment>/runs/<run>/made.json   commit, finished, stamped ("run" by the sweep itself, "history" for runs
                                            older than this file: what the repository's history says of their logs)
"""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MADE = "made.json"
VERSIONS = ("torch", "horovod", "mpi4py", "hvfreeze")


def commit() -> str:
    """Return the commit of the source, with "-dirty" where files differ from it; empty where that is not known."""
    try:
        known = git("rev-parse", "--short", "HEAD").strip()
        # Results change while they are being made.
        changed = git("status", "--porcelain", "--", ":/", ":!/analysis/results", ":!/README.md").strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{known}-dirty" if changed else known


def git(*arguments: str) -> str:
    """Return what git says about this source."""
    where = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout


def stamp(folder: Path, *, source: str) -> None:
    """Write down in a run's folder which source made it, and that it ended now."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    told = {"commit": source, "finished": now, "stamped": "run"}
    (folder / MADE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def made_columns(folder: Path, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return source, time, machine and versions of a kept run, None where they are not known."""
    path = folder / MADE
    told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    versions = environment.get("versions", {})
    return {
        **{key: told.get(key) for key in ("commit", "finished", "stamped")},
        **{key: environment.get(key) for key in ("processor", "cores", "threads")},
        **{name: versions.get(name) for name in VERSIONS},
    }
